//! Events of a controller for its owner.

mod display;

use tenmil_base::IoCompletion;
use tenmil_wire::Status;
use tenmil_wire::identify::CommandSet;
use tenmil_wire::log;
use tenmil_wire::log::error_information::ErrorEntry;
use tenmil_wire::log::event::ErrorEvent;
use tenmil_wire::log::health::HealthInformation;

use crate::controller::CmbUnavailable;
use crate::error::{ControllerError, InvalidValue, ResetCause};

/// Event of a controller. Events are delivered in the order in which they occurred.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Start-up is complete: commands and queue pairs may be requested. Occurs once per controller.
    Ready,
    /// A command of the owner has completed, and the controller no longer accesses its memory.
    AdminCompleted(IoCompletion),

    /// A queue pair was created and can be taken.
    QueuePairCreated {
        /// Queue pair identifier.
        id: u16,
    },
    /// The controller failed to create a queue pair. After a reset, this can happen to an existing one;
    /// it then completes all its commands and rejects new ones.
    QueuePairRefused {
        /// Queue pair identifier, which may be reused.
        id: u16,
        /// Status of the command.
        status: Status,
    },
    /// The submission ring of a queue pair could not be placed in the controller memory buffer. The queue
    /// pair works nevertheless.
    RingInHostMemory {
        /// Queue pair identifier.
        id: u16,
        /// Reason.
        why: CmbUnavailable,
    },
    /// A queue pair was deleted, and the controller no longer accesses its memory.
    QueuePairDeleted {
        /// Queue pair identifier, which may be reused.
        id: u16,
    },
    /// A command has timed out and is being aborted.
    CommandOverdue {
        /// Queue identifier; 0 is the admin queue.
        queue: u16,
        /// Command identifier.
        cid: u16,
    },

    /// A namespace became usable.
    NamespaceAttached {
        /// Namespace identifier.
        id: u32,
    },
    /// A namespace is no longer usable.
    NamespaceDetached {
        /// Namespace identifier.
        id: u32,
    },
    /// The size of a namespace has changed.
    NamespaceResized {
        /// Namespace identifier.
        id: u32,
        /// Previous number of blocks.
        from_blocks: u64,
        /// New number of blocks.
        to_blocks: u64,
    },
    /// Format, identity or state of a namespace has changed. Cached knowledge about its blocks is
    /// invalid.
    NamespaceChanged {
        /// Namespace identifier.
        id: u32,
    },
    /// A namespace exists and cannot be used.
    NamespaceUnusable {
        /// Namespace identifier.
        id: u32,
        /// Reason.
        why: NamespaceError,
    },
    /// There are more namespaces than the driver tracks.
    NamespacesIgnored {
        /// Number of namespaces ignored, of those counted.
        count: u32,
    },
    /// The namespace list is invalid or could not be read; the known namespaces are kept.
    NamespaceListUnusable {
        /// Reason.
        why: NamespaceError,
    },

    /// The controller reports a change of its health.
    Health(Box<HealthInformation>),
    /// The controller reports an error that belongs to no command.
    ErrorReported {
        /// Kind of error.
        what: ErrorEvent,
        /// Newest entry of the Error Information log page.
        newest: Option<Box<ErrorEntry>>,
    },
    /// Firmware is being activated: commands may be slow or fail for some time.
    FirmwareActivation,
    /// The access state of namespaces has changed (ANA).
    AccessChanged,
    /// A notice that the driver does not interpret; its log page has been read, which enables the next
    /// notice of this kind.
    Notice {
        /// Content of the notice.
        what: log::event::AsyncEvent,
        /// Identifier of its log page.
        log_page: u8,
    },
    /// The controller rejected the Asynchronous Event Configuration.
    EventConfigurationRefused {
        /// Status of the command.
        status: Status,
        /// Whether at least the supported notices are enabled: changes of namespaces, of access states
        /// and so on. If not, such changes are detected only when a command fails, or after a reset.
        has_notices: bool,
    },
    /// The controller rejected an Asynchronous Event Request, or its number.
    EventsRefused {
        /// Status of the command.
        status: Status,
        /// Number of requests still outstanding.
        left: u16,
    },

    /// A reset has started. No command completes until the controller has stopped its DMA.
    ResetStarted {
        /// Reason.
        cause: ResetCause,
    },
    /// The controller is ready again; its queue pairs resume one after the other.
    Recovered,
    /// A queue pair has resumed after a reset.
    QueuePairResumed {
        /// Queue pair identifier.
        id: u16,
    },
    /// The controller was shut down and disabled.
    ShutDown {
        /// Whether it reported the shutdown as complete.
        is_clean: bool,
    },
    /// The controller failed permanently. Its DMA is revoked.
    Dead(ControllerError),
    /// The controller was removed. Its DMA is revoked.
    Removed,
}

/// Reason why a namespace cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceError {
    /// Its Identify data are invalid.
    InvalidData(InvalidValue),
    /// An Identify command failed.
    IdentifyFailed(Status),
    /// It belongs to a command set other than NVM.
    CommandSet(CommandSet),
}
