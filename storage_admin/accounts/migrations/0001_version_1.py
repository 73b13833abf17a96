import django.contrib.auth.models
import django.contrib.auth.validators
import django.db.models.deletion
import django.utils.timezone
import uuid
from django.conf import settings
from django.core.management import call_command
from django.db import migrations, models

from storage_admin.accounts import append_only


def make_cache(apps, schema_editor):
    """The table of the setting CACHES, which no model describes."""
    call_command('createcachetable', database=schema_editor.connection.alias, verbosity=0)


def drop_cache(apps, schema_editor):
    schema_editor.execute('DROP TABLE cache')


class Migration(migrations.Migration):

    #: What earlier versions had in its place: a database with all of these goes on, one with some of them is refused.
    replaces = [
        ('accounts', '0001_initial'),
        ('accounts', '0002_views_and_scopes'),
        ('accounts', '0003_sessions_refusals_append_only'),
        ('accounts', '0004_default_views'),
        ('accounts', '0005_second_factor'),
        ('accounts', '0006_directory_users'),
    ]

    initial = True

    dependencies = [
        ('auth', '0012_alter_user_first_name_max_length'),
    ]

    operations = [
        migrations.CreateModel(
            name='RefusedAttempts',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('key', models.CharField(max_length=64, unique=True)),
                ('who', models.CharField(max_length=150)),
                ('what', models.CharField(max_length=100)),
                ('target', models.TextField(blank=True)),
                ('address', models.GenericIPAddressField(null=True)),
                ('since', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('more', models.PositiveIntegerField(default=0)),
            ],
        ),
        migrations.CreateModel(
            name='SignInRules',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('second_factor_roles', models.JSONField(blank=True, default=list)),
            ],
        ),
        migrations.CreateModel(
            name='Token',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100, unique=True)),
                ('digest', models.CharField(max_length=64, unique=True)),
                ('role', models.CharField(choices=[('viewer', 'Viewer'), ('operator', 'Operator'), ('admin', 'Admin')], max_length=10)),
                ('hosts', models.JSONField(blank=True, default=list)),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('created_by', models.CharField(max_length=150)),
                ('expires', models.DateTimeField(blank=True, null=True)),
                ('last_used', models.DateTimeField(blank=True, null=True)),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='User',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('password', models.CharField(max_length=128, verbose_name='password')),
                ('last_login', models.DateTimeField(blank=True, null=True, verbose_name='last login')),
                ('is_superuser', models.BooleanField(default=False, help_text='Designates that this user has all permissions without explicitly assigning them.', verbose_name='superuser status')),
                ('username', models.CharField(error_messages={'unique': 'A user with that username already exists.'}, help_text='Required. 150 characters or fewer. Letters, digits and @/./+/-/_ only.', max_length=150, unique=True, validators=[django.contrib.auth.validators.UnicodeUsernameValidator()], verbose_name='username')),
                ('first_name', models.CharField(blank=True, max_length=150, verbose_name='first name')),
                ('last_name', models.CharField(blank=True, max_length=150, verbose_name='last name')),
                ('email', models.EmailField(blank=True, max_length=254, verbose_name='email address')),
                ('is_staff', models.BooleanField(default=False, help_text='Designates whether the user can log into this admin site.', verbose_name='staff status')),
                ('is_active', models.BooleanField(default=True, help_text='Designates whether this user should be treated as active. Unselect this instead of deleting accounts.', verbose_name='active')),
                ('date_joined', models.DateTimeField(default=django.utils.timezone.now, verbose_name='date joined')),
                ('role', models.CharField(choices=[('viewer', 'Viewer'), ('operator', 'Operator'), ('admin', 'Admin')], default='viewer', max_length=10)),
                ('hosts', models.JSONField(blank=True, default=list)),
                ('must_change_password', models.BooleanField(default=False)),
                ('source', models.CharField(blank=True, choices=[('', 'local'), ('oidc', 'OpenID Connect'), ('ldap', 'LDAP')], default='', max_length=10)),
                ('external_id', models.CharField(blank=True, default='', max_length=400)),
                ('groups', models.ManyToManyField(blank=True, help_text='The groups this user belongs to. A user will get all permissions granted to each of their groups.', related_name='user_set', related_query_name='user', to='auth.group', verbose_name='groups')),
                ('user_permissions', models.ManyToManyField(blank=True, help_text='Specific permissions for this user.', related_name='user_set', related_query_name='user', to='auth.permission', verbose_name='user permissions')),
            ],
            managers=[
                ('objects', django.contrib.auth.models.UserManager()),
            ],
        ),
        migrations.CreateModel(
            name='AuditEntry',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(auto_now_add=True, db_index=True)),
                ('who', models.CharField(max_length=150)),
                ('what', models.CharField(max_length=100)),
                ('target', models.TextField(blank=True)),
                ('before', models.JSONField(null=True)),
                ('after', models.JSONField(null=True)),
                ('refused', models.BooleanField(default=False)),
                ('address', models.GenericIPAddressField(null=True)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['who', '-id'], name='audit_by_who'), models.Index(fields=['what', '-id'], name='audit_by_what')],
            },
        ),
        migrations.CreateModel(
            name='SavedView',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('by', models.CharField(blank=True, max_length=150)),
                ('page', models.CharField(max_length=40)),
                ('name', models.CharField(max_length=100)),
                ('query', models.TextField(blank=True)),
                ('shared', models.BooleanField(default=False)),
                ('created', models.DateTimeField(default=django.utils.timezone.now)),
                ('user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='views', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['page', 'name'],
            },
        ),
        migrations.CreateModel(
            name='DefaultView',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('page', models.CharField(max_length=40)),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='default_views', to=settings.AUTH_USER_MODEL)),
                ('view', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='default_of', to='accounts.savedview')),
            ],
        ),
        migrations.CreateModel(
            name='Session',
            fields=[
                ('session_key', models.CharField(max_length=40, primary_key=True, serialize=False, verbose_name='session key')),
                ('session_data', models.TextField(verbose_name='session data')),
                ('expire_date', models.DateTimeField(db_index=True, verbose_name='expire date')),
                ('uid', models.UUIDField(db_index=True, default=uuid.uuid4)),
                ('since', models.DateTimeField(null=True)),
                ('seen', models.DateTimeField(null=True)),
                ('address', models.GenericIPAddressField(null=True)),
                ('browser', models.CharField(blank=True, max_length=60)),
                ('user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='sessions', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'verbose_name': 'session',
                'verbose_name_plural': 'sessions',
                'abstract': False,
            },
        ),
        migrations.AddConstraint(
            model_name='user',
            constraint=models.UniqueConstraint(condition=models.Q(('external_id', ''), _negated=True), fields=('source', 'external_id'), name='one_user_per_external_id'),
        ),
        migrations.AddIndex(
            model_name='savedview',
            index=models.Index(condition=models.Q(('shared', True)), fields=['page'], name='view_shared'),
        ),
        migrations.AddConstraint(
            model_name='savedview',
            constraint=models.UniqueConstraint(fields=('user', 'page', 'name'), name='one_view_per_name'),
        ),
        migrations.AddConstraint(
            model_name='savedview',
            constraint=models.UniqueConstraint(condition=models.Q(('user', None)), fields=('page', 'name'), name='one_view_of_tokens_per_name'),
        ),
        migrations.AddConstraint(
            model_name='defaultview',
            constraint=models.UniqueConstraint(fields=('user', 'page'), name='one_default_view_per_page'),
        ),
        migrations.RunPython(append_only.protect, append_only.unprotect),
        migrations.RunPython(make_cache, drop_cache),
    ]
