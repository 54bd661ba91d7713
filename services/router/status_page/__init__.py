"""The status page of a router: `/` for people, `/status.json` behind it, `/metrics` beside it."""

from services.router.status_page.routes import add_routes as add_routes
