"""The icons: strokes on a field of 24, in the colour of the text beside them."""

from django import template
from django.utils.safestring import SafeString, mark_safe

register = template.Library()

SHAPES = {
    "logo": '<path d="M12 3 21 8l-9 5-9-5z"/><path d="m3 12.5 9 5 9-5"/><path d="m3 17 9 5 9-5"/>',
    "overview": '<rect x="3" y="3" width="8" height="10" rx="1"/><rect x="3" y="17" width="8" height="4" rx="1"/>'
    '<rect x="15" y="3" width="6" height="4" rx="1"/><rect x="15" y="11" width="6" height="10" rx="1"/>',
    "image": '<circle cx="12" cy="12" r="9"/><circle cx="12" cy="12" r="2.5"/>'
    '<path d="M12 6.5A5.5 5.5 0 0 1 17.5 12"/>',
    "host": '<rect x="3" y="3.5" width="18" height="7" rx="1.5"/><rect x="3" y="13.5" width="18" height="7" rx="1.5"/>'
    '<path d="M7 7h.01M7 17h.01M11 7h6M11 17h6"/>',
    "pool": '<ellipse cx="12" cy="5.5" rx="8" ry="3"/><path d="M4 5.5v13c0 1.7 3.6 3 8 3s8-1.3 8-3v-13"/>'
    '<path d="M4 12c0 1.7 3.6 3 8 3s8-1.3 8-3"/>',
    "guest": '<rect x="3" y="4" width="18" height="12" rx="1.5"/><path d="M8 20.5h8M12 16v4.5"/>',
    "job": '<path d="m3.5 5.5 1.5 1.5L8 4M3.5 12l1.5 1.5L8 10.5M3.5 18.5 5 20l3-3M12 6h9M12 12h9M12 18.5h9"/>',
    "ledger": '<path d="M6 3.5h12a1.5 1.5 0 0 1 1.5 1.5v14a1.5 1.5 0 0 1-1.5 1.5H6z"/><path d="M6 3.5v17M3.5 8H8M3.5 16'
    'H8M11 9h5.5M11 13h5.5"/>',
    "token": '<circle cx="8" cy="15.5" r="4.5"/><path d="m11.5 12 8.5-8.5M16 7.5l3 3"/>',
    "user": '<circle cx="12" cy="7.5" r="4"/><path d="M4 21c0-4.5 3.5-7 8-7s8 2.5 8 7"/>',
    "orphan": '<path d="M4 7h16M6 7v12.5h12V7M9 7V4h6v3"/><path d="M10 11h4"/>',
    "audit": '<path d="M12 3 4 6v5.5c0 5 3.4 8.3 8 9.5 4.6-1.2 8-4.5 8-9.5V6z"/>',
    "theme": '<circle cx="12" cy="12" r="8.5"/><path d="M12 3.5v17M12 7l6-1M12 11h8M12 15h8M12 19h4"/>',
    "leave": '<path d="M14 8V5.5A1.5 1.5 0 0 0 12.5 4h-7A1.5 1.5 0 0 0 4 5.5v13A1.5 1.5 0 0 0 5.5 20h7'
    'a1.5 1.5 0 0 0 1.5-1.5V16M9 12h12M18 9l3 3-3 3"/>',
    "bell": '<path d="M6 17V11a6 6 0 0 1 12 0v6l1.5 2h-15zM10 21.5h4M12 5V3"/>',
    "alert": '<path d="M12 3.5 2.5 20h19zM12 10v4.5M12 17.2v.1"/>',
    "cut": '<path d="M9 15 4.5 19.5M19.5 4.5 15 9M7 9l-2 2a3.5 3.5 0 0 0 0 5l3 3a3.5 3.5 0 0 0 5 0l2-2'
    'M17 15l2-2a3.5 3.5 0 0 0 0-5l-3-3a3.5 3.5 0 0 0-5 0L9 7"/>',
    "gauge": '<path d="M4 17a9 9 0 1 1 16 0M12 14l4-5"/><circle cx="12" cy="14.5" r="1.2"/>',
    "check": '<circle cx="12" cy="12" r="9"/><path d="m8 12.3 2.8 2.7L16 9.5"/>',
    "info": '<circle cx="12" cy="12" r="9"/><path d="M12 11v5.5M12 7.5v.1"/>',
    "stop": '<circle cx="12" cy="12" r="9"/><path d="m9 9 6 6M15 9l-6 6"/>',
    "clock": '<circle cx="12" cy="12" r="9"/><path d="M12 7v5.5l3.5 2"/>',
    "folder": '<path d="M3 7a2 2 0 0 1 2-2h4.5l2 2.5H19a2 2 0 0 1 2 2V17a2 2 0 0 1-2 2H5a2 2 0 0 1-2-2z"/>',
    "download": '<path d="M12 4v11M7.5 11l4.5 4.5 4.5-4.5M4 20h16"/>',
}


@register.simple_tag
def icon(name: str) -> SafeString:
    """An icon that says nothing of its own: the words stand beside it.

    Raises:
        KeyError: there is no icon of that name.
    """
    # Safe: the shapes are constants of this module.
    return mark_safe(f'<svg class="icon" viewBox="0 0 24 24" aria-hidden="true">{SHAPES[name]}</svg>')  # noqa: S308
