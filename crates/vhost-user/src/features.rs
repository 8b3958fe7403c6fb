//! Feature bits of the device and of the protocol.

/// Device features (virtio 5.2.3 and 6; vhost-user, "Feature negotiation").
pub mod device {
    /// `size_max` is valid.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// `seg_max` is valid.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The device is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` is valid.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// The device has a write cache and supports flush.
    pub const FLUSH: u64 = 1 << 9;
    /// Topology fields are valid.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The device has several queues.
    pub const MQ: u64 = 1 << 12;
    /// Discard is supported.
    pub const DISCARD: u64 = 1 << 13;
    /// Write zeroes is supported.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Indirect descriptors are supported.
    pub const RING_INDIRECT_DESC: u64 = 1 << 28;
    /// Notifications are suppressed by event index.
    pub const RING_EVENT_IDX: u64 = 1 << 29;
    /// Protocol features can be negotiated.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
}

/// Protocol features (vhost-user, "Protocol features").
pub mod protocol {
    /// Multiple queues.
    pub const MQ: u64 = 1 << 0;
    /// Any message may request an acknowledgement.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The back end may initiate messages over a separate socket.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// Configuration space is accessed by message.
    pub const CONFIG: u64 = 1 << 9;
    /// Requests in flight are recorded in memory that the front end keeps.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// Memory regions are added and removed individually.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// Features supported here.
    pub const OURS: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | CONFIGURE_MEM_SLOTS;
}
