"""The site: `make docs` reads the pages beside this file, docstrings and sources, and writes docs/_build/html."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

import pages  # docs/_site/pages.py

project = "meshcomm"
author = copyright = "meshcomm contributors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "_site"]

html_theme = "furo"
html_title = "meshcomm"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
pygments_style, pygments_dark_style = "friendly", "github-dark"

# Tutorials are run when the site is built, and one that fails is no site.
nb_execution_mode, nb_execution_raise_on_error, nb_execution_timeout = "cache", True, 120
nb_execution_cache_path = str(Path(__file__).parent / "_build" / "notebooks")

# In pages, a diff is what the tests run; links to headings are those that GitHub makes.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. |\$ ", True

# Signatures as one reads them: AxisName and not what it is an alias of, one parameter per line where they are many.
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
add_module_names = False
python_maximum_signature_line_length = 100
default_role = "literal"

setup = pages.setup
