//! What a controller's owner is told.

mod display;

use base::Answer;
use wire::Status;
use wire::identify::CommandSet;
use wire::log;
use wire::log::error::ErrorEntry;
use wire::log::event::ErrorEvent;
use wire::log::health::HealthInformation;

use crate::controller::NotInBuffer;
use crate::error::{ControllerError, Lie, ResetCause};

/// Something that happened to a controller. Events come in the order of what they tell.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Start-up is done: commands and queue pairs can be asked for. Once in a controller's life.
    Ready,
    /// A command of the owner's has ended, and the controller no longer touches its memory.
    AdminCompleted(Answer),

    /// A queue pair exists and can be taken.
    QueuePairCreated {
        /// Its identifier.
        id: u16,
    },
    /// The controller would not create a queue pair. After a reset this can happen to one that
    /// existed; it then answers everything and refuses everything from now on.
    QueuePairRefused {
        /// Its identifier, which may be used again.
        id: u16,
        /// What the controller said.
        status: Status,
    },
    /// The submission ring of a queue pair was to lie in the controller memory buffer, and does not.
    /// It works all the same.
    RingInHostMemory {
        /// Its identifier.
        id: u16,
        /// Why.
        why: NotInBuffer,
    },
    /// A queue pair has been deleted, and the controller no longer touches its memory.
    QueuePairDeleted {
        /// Its identifier, which may be used again.
        id: u16,
    },
    /// A command has missed its deadline and is being aborted.
    CommandOverdue {
        /// Its queue; 0 is the admin queue.
        queue: u16,
        /// Its command identifier.
        cid: u16,
    },

    /// A namespace can be used.
    NamespaceAttached {
        /// Its identifier.
        id: u32,
    },
    /// A namespace can no longer be used.
    NamespaceDetached {
        /// Its identifier.
        id: u32,
    },
    /// A namespace has more or fewer blocks than before.
    NamespaceResized {
        /// Its identifier.
        id: u32,
        /// How many it had.
        from_blocks: u64,
        /// How many it has.
        to_blocks: u64,
    },
    /// A namespace is not what it was: another format, identity or state. What was known about its
    /// blocks does not hold any more.
    NamespaceChanged {
        /// Its identifier.
        id: u32,
    },
    /// A namespace is there and cannot be used.
    NamespaceUnusable {
        /// Its identifier.
        id: u32,
        /// Why.
        why: Unusable,
    },
    /// There are more namespaces than are kept track of.
    NamespacesIgnored {
        /// How many are left out, of those that were counted.
        count: u32,
    },
    /// The list of namespaces makes no sense or cannot be had; what was known is kept.
    NamespaceListUnusable {
        /// Why.
        why: Unusable,
    },

    /// The controller has something to say about its health.
    Health(Box<HealthInformation>),
    /// The controller has met an error that it cannot tell any command of.
    ErrorReported {
        /// Which.
        what: ErrorEvent,
        /// The newest entry of the Error Information log page.
        newest: Option<Box<ErrorEntry>>,
    },
    /// Firmware is being activated: commands may be slow or fail for a while.
    FirmwareActivation,
    /// The access state of namespaces has changed (ANA).
    AccessChanged,
    /// Something that is told and not interpreted; its log page has been read, so that the next of
    /// its kind can be told.
    Notice {
        /// What it says.
        what: log::event::Event,
        /// The log page that holds more.
        log_page: u8,
    },
    /// The controller does not tell all that it was asked to tell (Asynchronous Event Configuration).
    EventConfigurationRefused {
        /// What it said.
        status: Status,
        /// Whether it tells at least of what it announces: changes of namespaces, of access and so on.
        /// If not, such changes are noticed only when a command fails, or after a reset.
        has_notices: bool,
    },
    /// The controller does not take (so many) Asynchronous Event Requests.
    EventsRefused {
        /// What it said.
        status: Status,
        /// How many it still holds.
        left: u16,
    },

    /// A reset begins. Nothing is answered until the controller has let go of memory.
    ResetStarted {
        /// Why.
        cause: ResetCause,
    },
    /// The controller is back; queue pairs run again by and by.
    Recovered,
    /// A queue pair runs again after a reset.
    QueuePairResumed {
        /// Its identifier.
        id: u16,
    },
    /// The controller has been shut down and switched off.
    ShutDown {
        /// Whether it said that it had completed.
        is_clean: bool,
    },
    /// The controller cannot be used and will not be tried again. It has been cut off from memory.
    Dead(ControllerError),
    /// The controller is no longer there. It has been cut off from memory.
    Removed,
}

/// Why a namespace cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// What is said about it makes no sense.
    Lie(Lie),
    /// The controller would say nothing about it.
    Refused(Status),
    /// It belongs to another command set than NVM.
    CommandSet(CommandSet),
}
