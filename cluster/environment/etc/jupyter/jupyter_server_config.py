"""Every JupyterLab of this environment, by whichever server, has the style of custom/custom.css.

Like the rest of cluster/environment/ it is installed into the environment. Settings in a home come after these.
"""

from pathlib import Path

from jupyter_core.paths import jupyter_config_dir

c = get_config()  # noqa: F821  # Jupyter puts it here

c.LabApp.custom_css = True
# Where custom.css is looked for: first where the user's own is. This list is no setting of ServerApp by itself.
places = Path(jupyter_config_dir(), "custom"), Path(__file__).parent / "custom"
c.ServerApp.tornado_settings = {"static_custom_path": [str(place) for place in places]}
