"""Configure Sphinx for the site; docs/site/build_site.py runs it."""

project = "lockstep"
html_title = "lockstep"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 6  # anchors as GitHub makes them, so that a link works in both places
highlight_language = "text"  # a block without a language is a terminal's
exclude_patterns = ["examples", "src", "bench"]  # files that pages link to
smartquotes = False  # would make a dash of the two hyphens of a flag
html_theme = "furo"
html_static_path = ["search.js"]  # beside this file
html_js_files = ["search.js"]  # a pasted message finds its entry
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
