"""The pages' addresses."""

from django.urls import path

from images.views import (
    account,
    admin,
    audit,
    bulk,
    guest,
    guest_io,
    guests,
    host_add,
    hosts,
    image,
    images,
    jobs,
    orphans,
    overview,
    rewrite,
    saved_views,
    users,
)

urlpatterns = [
    path("", overview.overview, name="overview"),
    path("images/", images.images, name="images"),
    path("images/export.csv", images.images_csv, name="images_csv"),
    path("images/analyze/", images.images_analyze, name="images_analyze"),
    path("images/reclaim/", bulk.images_reclaim, name="images_reclaim"),
    path("images/<int:image_id>/", image.image, name="image"),
    path("images/<int:image_id>/analyze/", image.image_analyze, name="image_analyze"),
    path("images/<int:image_id>/format/", image.image_format, name="image_format"),
    *(
        path(f"images/<int:image_id>/{kind}/", rewrite.rewrite, {"kind_name": kind}, name=kind)
        for kind in ("reclaim", "flatten", "convert", "check")
    ),
    path("orphans/", orphans.orphans, name="orphans"),
    *(
        path(f"images/<int:image_id>/{word}/", orphans.aside, {"kind_name": kind}, name=kind)
        for word, kind in (("set-aside", "set_aside"), ("restore", "restore_aside"), ("delete", "delete_aside"))
    ),
    path("jobs/", jobs.jobs, name="jobs"),
    path("jobs/export.csv", jobs.jobs_csv, name="jobs_csv"),
    path("jobs/count/", jobs.jobs_count, name="jobs_count"),
    path("jobs/<int:job_id>/", jobs.job, name="job"),
    path("jobs/<int:job_id>/status/", jobs.job_status, name="job_status"),
    path("jobs/<int:job_id>/log/", jobs.job_log, name="job_log"),
    path("jobs/<int:job_id>/cancel/", jobs.job_cancel, name="job_cancel"),
    path("jobs/<int:job_id>/retry/", jobs.job_retry, name="job_retry"),
    path("jobs/<int:job_id>/undo/", jobs.job_undo, name="job_undo"),
    path("jobs/<int:job_id>/discard-undo/", jobs.job_discard_undo, name="job_discard_undo"),
    path("hosts/", hosts.hosts, name="hosts"),
    path("hosts/export.csv", hosts.hosts_csv, name="hosts_csv"),
    path("pools/export.csv", hosts.pools_csv, name="pools_csv"),
    path("hosts/add/", host_add.host_add, name="host_add"),
    path("hosts/<int:host_id>/connection/", host_add.host_connection, name="host_connection"),
    path("hosts/<int:host_id>/remove/", hosts.host_remove, name="host_remove"),
    path("hosts/<int:host_id>/", hosts.host_change, name="host_change"),
    path("hosts/<int:host_id>/scan/", hosts.host_scan, name="host_scan"),
    path("hosts/<int:host_id>/folders/", hosts.folder_add, name="folder_add"),
    path("pools/<int:pool_id>/", hosts.pool, name="pool"),
    path("pools/<int:pool_id>/change/", hosts.pool_change, name="pool_change"),
    path("pools/<int:pool_id>/remove/", hosts.pool_remove, name="pool_remove"),
    path("guests/", guests.guests, name="guests"),
    path("guests/export.csv", guests.guests_csv, name="guests_csv"),
    path("guests/io/", guest_io.guest_io, name="guest_io"),
    path("guests/<int:guest_id>/", guest.guest, name="guest"),
    *(
        path(f"guests/<int:guest_id>/{kind.replace('_', '-')}/", guest.guest_job, {"kind_name": kind}, name=kind)
        for kind in ("move_disk", "resize", "trim")
    ),
    path("views/", saved_views.view_save, name="view_save"),
    path("views/<int:view_id>/", saved_views.view_change, name="view_change"),
    path("views/<int:view_id>/delete/", saved_views.view_delete, name="view_delete"),
    path("tokens/", admin.tokens, name="tokens"),
    path("tokens/<int:token_id>/delete/", admin.token_delete, name="token_delete"),
    path("users/", users.users, name="users"),
    path("users/<int:user_id>/", users.user, name="user"),
    path("users/<int:user_id>/active/", users.user_active, name="user_active"),
    path("users/<int:user_id>/password/", users.user_password, name="user_password"),
    path("users/<int:user_id>/sign-out/", users.user_sign_out, name="user_sign_out"),
    path("users/<int:user_id>/sessions/<uuid:uid>/end/", users.user_session_end, name="user_session_end"),
    path("users/lockouts/<int:lockout_id>/end/", users.lockout_end, name="lockout_end"),
    path("account/", account.account, name="account"),
    path("account/sign-out/", account.account_sign_out, name="account_sign_out"),
    path("account/sessions/<uuid:uid>/end/", account.account_session_end, name="account_session_end"),
    path("audit/", audit.audit, name="audit"),
    path("audit/export.csv", audit.audit_csv, name="audit_csv"),
]
