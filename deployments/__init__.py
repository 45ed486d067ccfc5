"""The Ray Serve application. Only `app.build_app` binds its deployments."""
