"""What every figure shares. matplotlib is imported only when something is drawn."""

from nanonorm.errors import BadInput

COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito: everyone tells them apart
GREY = "#999999"


def pyplot():
    """matplotlib's pyplot, drawing to files alone. Raises: BadInput if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise BadInput("figures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
