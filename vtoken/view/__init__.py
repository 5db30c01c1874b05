"""The page that shows the block pool: live from a server, or as one file with recordings in it."""

from vtoken.view.page import Grid, Section, live_page, report_page

__all__ = ["Grid", "Section", "live_page", "report_page"]
