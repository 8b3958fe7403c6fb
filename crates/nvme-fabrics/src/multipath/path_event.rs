//! Events of paths.

use core::fmt;

use super::path_selector::PathAnaState;

/// An event of a path. Paths are identified by index, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PathEvent {
    /// A path is usable.
    Up {
        /// Path index.
        path: usize,
        /// ANA state.
        access: PathAnaState,
    },
    /// A path is no longer usable, or could not be connected.
    Down {
        /// Path index.
        path: usize,
        /// Cause.
        why: String,
    },
    /// The ANA state of a path has changed.
    AnaChanged {
        /// Path index.
        path: usize,
        /// New ANA state.
        access: PathAnaState,
    },
    /// The best path has changed.
    Failover {
        /// The previous best path.
        from: usize,
        /// The new best path.
        to: usize,
    },
    /// No path is usable.
    AllPathsDown,
    /// A path leads to a different namespace. It is retried at intervals.
    NamespaceMismatch {
        /// Path index.
        path: usize,
        /// Found and expected value.
        why: String,
    },
    /// The controller of the only path has failed permanently, or its reconnects have ended: the device
    /// is gone.
    Removed {
        /// Path index.
        path: usize,
        /// Cause.
        why: String,
    },
    /// The old controller of a lost path has been reset by another one (Cross-Controller Reset, NVM
    /// Express Base 2.3, section 5.4.3), and can no longer execute commands.
    ControllerFenced {
        /// The lost path.
        path: usize,
        /// The path of the resetting controller.
        by: usize,
    },
    /// An event of the controller of a path.
    Controller {
        /// Path index.
        path: usize,
        /// The event.
        event: tenmil_nvme_host::Event,
    },
}

impl PathEvent {
    /// Whether an operator should see it. Other controller events are for management software.
    #[must_use]
    pub const fn is_for_operator(&self) -> bool {
        match self {
            Self::Controller { event, .. } => {
                matches!(
                    event,
                    tenmil_nvme_host::Event::EventConfigurationRefused { has_notices: false, .. }
                )
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
            Self::AnaChanged { path, access } => write!(out, "path {path} is {}", access.name()),
            Self::Failover { from, to } => write!(out, "path {to} instead of path {from}"),
            Self::AllPathsDown => out.write_str("no path is left"),
            Self::ControllerFenced { path, by } => {
                write!(out, "path {by} has reset the old controller of path {path}")
            }
            Self::NamespaceMismatch { path, why } => write!(out, "path {path} is not used: {why}"),
            Self::Removed { path, why } => write!(out, "path {path} is removed: {why}"),
            Self::Controller {
                path,
                event:
                    tenmil_nvme_host::Event::EventConfigurationRefused { status, has_notices: false },
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
    use tenmil_nvme_host::Event;
    use tenmil_wire::Status;

    use super::PathEvent;

    #[test]
    fn rejected_event_configuration_is_reported_to_operators_only_without_notices() {
        let of = |event| PathEvent::Controller { path: 1, event };
        let refused = |has_notices| {
            of(Event::EventConfigurationRefused { status: Status::INVALID_FIELD, has_notices })
        };
        assert!(refused(false).is_for_operator() && PathEvent::AllPathsDown.is_for_operator());
        assert!(!refused(true).is_for_operator() && !of(Event::AccessChanged).is_for_operator());
        let text = refused(false).to_string();
        assert!(text.starts_with("path 1: its controller will not tell of changes"), "{text}");
    }
}
