//! What is told of paths.

use core::fmt;

use super::route::Access;

/// Something that has happened to a path. Paths are told by their numbers, in the order in which they
/// were given.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PathEvent {
    /// A path can be used.
    Up {
        /// Which.
        path: usize,
        /// How well it leads there.
        access: Access,
    },
    /// A path cannot be used any more, or could not be.
    Down {
        /// Which.
        path: usize,
        /// Why.
        why: String,
    },
    /// A path leads there better or worse than before.
    Access {
        /// Which.
        path: usize,
        /// How well it leads there now.
        access: Access,
    },
    /// Another path than before is the best.
    Failover {
        /// The best one before.
        from: usize,
        /// The best one now.
        to: usize,
    },
    /// No path leads there.
    NoPath,
    /// What a path leads to is not the same namespace. It is tried again now and then.
    Unfit {
        /// Which.
        path: usize,
        /// What was found, and what was expected.
        why: String,
    },
    /// What a path that was lost had led to can do nothing any more: another controller has reset it
    /// (Base 2.3 §5.4.3).
    OldControllerReset {
        /// The path that was lost.
        path: usize,
        /// The path whose controller did it.
        by: usize,
    },
    /// The controller of a path has something to say.
    Controller {
        /// Of which.
        path: usize,
        /// What.
        event: nvme::Event,
    },
}

impl PathEvent {
    /// Whether it says something about the remote SSD that whoever runs this should know. What
    /// controllers say besides is for programs.
    #[must_use]
    pub const fn is_for_people(&self) -> bool {
        match self {
            Self::Controller { event, .. } => {
                matches!(event, nvme::Event::EventConfigurationRefused { has_notices: false, .. })
            }
            _ => true,
        }
    }
}

impl fmt::Display for PathEvent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Up { path, access } => write!(out, "path {path} is up, {}", access.name()),
            Self::Down { path, why } => write!(out, "path {path} is down: {why}"),
            Self::Access { path, access } => write!(out, "path {path} is {}", access.name()),
            Self::Failover { from, to } => write!(out, "path {to} instead of path {from}"),
            Self::NoPath => out.write_str("no path is left"),
            Self::OldControllerReset { path, by } => {
                write!(out, "path {by} has reset the old controller of path {path}")
            }
            Self::Unfit { path, why } => write!(out, "path {path} is not used: {why}"),
            Self::Controller {
                path,
                event: nvme::Event::EventConfigurationRefused { status, has_notices: false },
            } => write!(
                out,
                "path {path}: its controller will not tell of changes (feature 0Bh: {status}): they \
                 are noticed when a command fails, or when it is attached again"
            ),
            Self::Controller { path, event } => write!(out, "path {path}: {event}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use nvme::Event;
    use wire::Status;

    use super::PathEvent;

    #[test]
    fn people_are_told_of_a_controller_that_tells_nothing_and_of_no_other() {
        let of = |event| PathEvent::Controller { path: 1, event };
        let refused = |has_notices| {
            of(Event::EventConfigurationRefused { status: Status::INVALID_FIELD, has_notices })
        };
        assert!(refused(false).is_for_people() && PathEvent::NoPath.is_for_people());
        assert!(!refused(true).is_for_people() && !of(Event::AccessChanged).is_for_people());
        let text = refused(false).to_string();
        assert!(text.starts_with("path 1: its controller will not tell of changes"), "{text}");
    }
}
