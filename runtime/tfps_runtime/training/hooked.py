"""A program's own `tf.train.SessionRunHook`s, called as `tf.train.MonitoredSession` calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf


class Hooked:
    """Steps with hooks. Build it while the graph can still be changed: `begin` of the hooks is called here."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        self.hooks = tuple(hooks)
        self._coord: Any = None
        for hook in self.hooks:
            hook.begin()

    def begin(self, session: Any, coord: Any) -> None:
        """There is a new session."""
        self._coord = coord
        for hook in self.hooks:
            hook.after_create_session(session, coord)

    def end(self, session: Any) -> None:
        """Training has ended without an error."""
        for hook in self.hooks:
            hook.end(session)

    def run(self, session: Any, fetches: Sequence[Any], feed: Mapping[Any, Any]) -> Sequence[Any]:
        """Run the fetches and those of the hooks; gives the values of the former."""
        context = tf.train.SessionRunContext(tf.train.SessionRunArgs(fetches, dict(feed)), session)
        wanted: dict[Any, Any] = {}
        all_feeds = dict(feed)
        options = None
        for hook in self.hooks:
            request = hook.before_run(context)
            if request is not None:
                if request.fetches is not None:
                    wanted[hook] = request.fetches
                all_feeds.update(request.feed_dict or {})
                options = request.options or options
        metadata = None if options is None else tf.RunMetadata()
        values, found = session.run(
            (list(fetches), wanted), all_feeds, options=options, run_metadata=metadata
        )
        for hook in self.hooks:
            hook.after_run(
                context,
                tf.train.SessionRunValues(results=found.get(hook), options=options, run_metadata=metadata),
            )
        if context.stop_requested:
            self._coord.request_stop()
        return values  # type: ignore[no-any-return]
