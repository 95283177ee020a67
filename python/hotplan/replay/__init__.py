"""Serving traces turned into forward steps, and the plans of every step.

``trace`` reads or generates requests, ``scheduler`` turns them into steps over the paged tables of ``pool`` and the
prefix cache of ``prefix``, ``steps`` builds each step's plans, ``verify`` checks them, ``runner`` drives the loop and
``report`` shows the result. ``residency`` keeps hot buffers beside it, over the ids of ``locality`` and the pool of
``host_rows``; ``verify_residency`` and ``residency_report`` are its check and its report. Nothing here is needed to use
the operators.
"""
