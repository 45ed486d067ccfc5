"""The Ray Serve application. `app.build_app` binds it; nothing else does."""
