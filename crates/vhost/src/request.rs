//! What a connection hands to its owner, and how it is answered.

use crate::code::Code;

/// What is offered to front ends.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Features of the device.
    pub features: u64,
    /// Queues.
    pub queues: u16,
    /// Configuration space; past its end it is zeroes.
    pub config: Vec<u8>,
    /// Stretches of memory at a time.
    pub slots: u16,
}

/// What the owner has to do.
#[derive(Debug)]
pub enum Request<F> {
    /// The memory is another from now on.
    Memory {
        /// To be answered.
        call: Call,
        /// In which way.
        change: MemoryChange<F>,
    },
    /// A queue begins to run.
    Start {
        /// To be answered.
        call: Call,
        /// Which.
        queue: u16,
        /// How.
        start: Start<F>,
    },
    /// A queue runs no more: to be answered with [`stopped`](crate::Server::stopped) once it touches nothing.
    Stop {
        /// To be answered.
        call: Call,
        /// Which.
        queue: u16,
    },
    /// Whom a queue calls: nobody from now on, if there is no descriptor.
    SetCall {
        /// To be answered.
        call: Call,
        /// Which.
        queue: u16,
        /// What is signalled.
        file: Option<F>,
    },
    /// The back end may send [`CONFIG_CHANGED`](crate::CONFIG_CHANGED) over this socket.
    SetBackChannel {
        /// To be answered.
        call: Call,
        /// The socket.
        file: F,
    },
    /// Memory for what is in flight is wanted: to be answered with [`inflight`](crate::Server::inflight).
    MakeInflight {
        /// To be answered.
        call: Call,
        /// Queues that it is for.
        queues: u16,
        /// Descriptors of each.
        size: u16,
    },
    /// What is in flight is kept here from now on.
    SetInflight {
        /// To be answered.
        call: Call,
        /// Where in the file.
        area: InflightArea,
        /// The file.
        file: F,
    },
}

/// How memory changes.
#[derive(Debug)]
pub enum MemoryChange<F> {
    /// It is this, and nothing else.
    Replace(Vec<(MemoryArea, F)>),
    /// There is more.
    Add(MemoryArea, F),
    /// This is there no more.
    Remove(MemoryArea),
}

/// A stretch of memory that the front end shares (vhost-user, "Memory region description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryArea {
    /// Where it begins for the guest.
    pub guest: u64,
    /// How long it is.
    pub len_bytes: u64,
    /// Where it begins in the front end.
    pub user: u64,
    /// Where it begins in its file.
    pub file_offset: u64,
}

/// A queue that begins to run.
#[derive(Clone, Debug)]
pub struct Start<F> {
    /// Entries.
    pub size: u16,
    /// The available entry that is taken first.
    pub base: u16,
    /// Descriptors, available ring and used ring, as addresses of the front end.
    pub addresses: [u64; 3],
    /// What is signalled when there is something to do. Without it the ring is to be looked at.
    pub kick: Option<F>,
    /// What was agreed on.
    pub features: u64,
}

/// Memory for what is in flight (vhost-user, "Inflight description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightArea {
    /// How long it is.
    pub len_bytes: u64,
    /// Where it begins in its file.
    pub file_offset: u64,
    /// Queues that it is for.
    pub queues: u16,
    /// Descriptors of each.
    pub size: u16,
}

/// How a message was answered by its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The front end was told that it failed.
    Told,
    /// The front end cannot be told: the connection is to be closed.
    Untold,
}

/// A message that the owner has to answer, once.
#[derive(Debug)]
#[must_use = "a message that is not answered stops all that follow"]
pub struct Call {
    pub(crate) code: Code,
    /// Whoever has sent it wants to be told how it went.
    pub(crate) wants_reply: bool,
    /// The queue that it is about.
    pub(crate) queue: u16,
    pub(crate) payload_bytes: usize,
}
