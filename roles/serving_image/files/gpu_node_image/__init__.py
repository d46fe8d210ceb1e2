"""Images on a node: the base is checked before anything is built, and only what is whole gets its name.

Installed beside the collection's own patch_series.py, image_inputs.py and sbom.py, which keep their import path there.
It needs nothing but Python itself: it also runs inside the build of an image.
"""
