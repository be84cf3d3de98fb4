"""Pictures of meshes, layouts, plans and traces: text in a terminal, SVG in a notebook, a file where asked."""
