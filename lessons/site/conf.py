"""How the site is built: `python -m sphinx -W lessons/site OUT`, from the repository root, without a network.

What stands elsewhere is not copied: the README, the lessons, docstrings, the flags of commands, the numbers of the cost
model and the refused plans are read where they are, while the site is built (see building/).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for path in (ROOT, HERE):
    sys.path.insert(0, str(path))
# Examples run in kernels of their own, which must find this repository's emu, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "emu"
author = "the authors of emu"
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "building"]
exclude_patterns = ["building"]
nitpicky = True  # a reference that leads nowhere is a warning, and warnings are errors

# Text
smartquotes = False  # two hyphens are a flag, and quotes are as typed
source_suffix = {".md": "myst-nb", ".lesson": "myst-nb"}
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
nb_custom_formats = {".lesson": "building.lessons.read"}

# Examples run when the site is built. Lessons have run already: their notebooks hold what came of it.
nb_execution_mode = "force"
nb_execution_excludepatterns = ["lessons/*"]
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

# Docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes, units and meanings stand in the docstrings; annotations would repeat half of them
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88

# Pages
html_theme = "furo"
html_title = "emu"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {
        "font-stack": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
        "font-stack--monospace": "ui-monospace, 'SFMono-Regular', Menlo, Consolas, 'DejaVu Sans Mono', monospace",
    },
}
