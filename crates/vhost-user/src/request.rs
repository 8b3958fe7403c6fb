//! Requests of a connection to its owner, and their replies.

use crate::message_types::MessageType;

/// Configuration offered to front ends.
#[derive(Clone, Debug)]
pub struct BackendConfig {
    /// Device features.
    pub features: u64,
    /// Number of queues.
    pub queues: u16,
    /// Configuration space; past its end it is zero.
    pub config: Vec<u8>,
    /// Largest number of memory regions.
    pub slots: u16,
}

/// Request to the owner.
#[derive(Debug)]
pub enum OwnerRequest<F> {
    /// Change the memory of the front end.
    Memory {
        /// Handle for the reply.
        call: PendingReply,
        /// Change.
        change: MemoryChange<F>,
    },
    /// Start a queue.
    Start {
        /// Handle for the reply.
        call: PendingReply,
        /// Queue index.
        queue: u16,
        /// Parameters.
        start: QueueStartParams<F>,
    },
    /// Stop a queue. Answered with [`stopped`](crate::Server::reply_queue_stopped) once the queue accesses
    /// nothing.
    Stop {
        /// Handle for the reply.
        call: PendingReply,
        /// Queue index.
        queue: u16,
    },
    /// Set or remove the call eventfd of a queue.
    SetCall {
        /// Handle for the reply.
        call: PendingReply,
        /// Queue index.
        queue: u16,
        /// Eventfd.
        file: Option<F>,
    },
    /// Set the socket for messages of the back end, such as
    /// [`CONFIG_CHANGED`](crate::CONFIG_CHANGED).
    SetBackChannel {
        /// Handle for the reply.
        call: PendingReply,
        /// Socket.
        file: F,
    },
    /// Create an inflight buffer. Answered with [`inflight`](crate::Server::reply_inflight).
    GetInflightFd {
        /// Handle for the reply.
        call: PendingReply,
        /// Number of queues.
        queues: u16,
        /// Number of descriptors per queue.
        size: u16,
    },
    /// Use this inflight buffer.
    SetInflightFd {
        /// Handle for the reply.
        call: PendingReply,
        /// Location and layout.
        area: InflightBuffer,
        /// File.
        file: F,
    },
}

/// Change of the memory of a front end.
#[derive(Debug)]
pub enum MemoryChange<F> {
    /// Replace all regions.
    Replace(Vec<(MemoryRegionDesc, F)>),
    /// Add a region.
    Add(MemoryRegionDesc, F),
    /// Remove a region.
    Remove(MemoryRegionDesc),
}

/// Memory region of the front end (vhost-user, "Memory region description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegionDesc {
    /// Guest address.
    pub guest: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Address in the front end's process.
    pub user: u64,
    /// Offset in its file.
    pub file_offset: u64,
}

/// Parameters of a queue to start.
#[derive(Clone, Debug)]
pub struct QueueStartParams<F> {
    /// Number of entries.
    pub size: u16,
    /// First available index to take.
    pub base: u16,
    /// Addresses of descriptor table, available ring and used ring in the front end's process.
    pub addresses: [u64; 3],
    /// Kick eventfd. Without it the ring must be polled.
    pub kick: Option<F>,
    /// Negotiated device features.
    pub features: u64,
}

/// Inflight buffer (vhost-user, "Inflight description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightBuffer {
    /// Length in bytes.
    pub len_bytes: u64,
    /// Offset in its file.
    pub file_offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Number of descriptors per queue.
    pub size: u16,
}

/// Whether a failed message could be reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyDisposition {
    /// The front end was informed of the error.
    Reported,
    /// The front end cannot be informed; the connection must be closed.
    NotReported,
}

/// Message that the owner must answer, once.
#[derive(Debug)]
#[must_use = "a message that is not answered stops all that follow"]
pub struct PendingReply {
    pub(crate) code: MessageType,
    /// Whether the front end requested an acknowledgement.
    pub(crate) wants_reply: bool,
    /// Queue of the message.
    pub(crate) queue: u16,
    pub(crate) payload_bytes: usize,
}
