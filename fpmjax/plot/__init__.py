"""Pictures of models.  They need matplotlib, `pip install 'fpmjax[plot]'`, which is imported when one is drawn."""

from fpmjax.plot.figure import check_figure_path as check_figure_path
from fpmjax.plot.figure import write_figure as write_figure
from fpmjax.plot.fit import plot_fit as plot_fit
from fpmjax.plot.grids import plot_difference as plot_difference
from fpmjax.plot.grids import plot_grid as plot_grid
