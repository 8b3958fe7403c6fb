//! What both ends can do, as bits.

/// Features of the device (virtio 5.2.3 and 6; vhost-user, "Feature negotiation").
pub mod device {
    /// No segment is longer than `size_max`.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// No request has more segments than `seg_max`.
    pub const SEG_MAX: u64 = 1 << 2;
    /// Nobody may write.
    pub const RO: u64 = 1 << 5;
    /// Blocks are as long as `blk_size`.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// There is a cache, and it can be flushed.
    pub const FLUSH: u64 = 1 << 9;
    /// What suits the disk best is told.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// There are several queues.
    pub const MQ: u64 = 1 << 12;
    /// Blocks can be discarded.
    pub const DISCARD: u64 = 1 << 13;
    /// Zeroes can be written without sending them.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// A descriptor may stand for a table of others.
    pub const RING_INDIRECT_DESC: u64 = 1 << 28;
    /// Kicks and calls are asked for by index.
    pub const RING_EVENT_IDX: u64 = 1 << 29;
    /// There are protocol features.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
}

/// Features of the protocol (vhost-user, "Protocol features").
pub mod protocol {
    /// There may be more than one queue.
    pub const MQ: u64 = 1 << 0;
    /// Any message may be asked to be answered.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The back end may send messages of its own, over a socket that it is given.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// Configuration space is asked for.
    pub const CONFIG: u64 = 1 << 9;
    /// What is in flight is kept in memory that the front end keeps.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// Memory comes and goes piece by piece.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// Those that are spoken here.
    pub const OURS: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | CONFIGURE_MEM_SLOTS;
}
