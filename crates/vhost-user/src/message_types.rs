//! Message types, and the allowed form of each.

use core::fmt;

use crate::features::protocol::{BACKEND_REQ, CONFIG, CONFIGURE_MEM_SLOTS, INFLIGHT_SHMFD, MQ};

/// Message type (vhost-user, "Front-end message types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageType(pub u32);

/// Size of a header in bytes: type, flags, payload size.
pub const HEADER_BYTES: usize = 12;

/// Message that the back end initiates (vhost-user, "Back-end message types"): configuration space
/// has changed.
pub(crate) const BACKEND_CONFIG_CHANGE_MSG: u32 = 2;

/// Protocol version 1, in bits 0 and 1 of the flags.
pub(crate) const VERSION: u32 = 1;
pub(crate) const VERSION_BITS: u32 = 3;
/// Flag of a reply.
pub(crate) const REPLY: u32 = 1 << 2;
/// Flag that requests an acknowledgement of a message without a reply of its own.
pub(crate) const NEED_REPLY: u32 = 1 << 3;

#[expect(missing_docs, reason = "the protocol's nouns")]
impl MessageType {
    pub const GET_FEATURES: Self = Self(1);
    pub const SET_FEATURES: Self = Self(2);
    pub const SET_OWNER: Self = Self(3);
    pub const RESET_OWNER: Self = Self(4);
    pub const SET_MEM_TABLE: Self = Self(5);
    pub const SET_VRING_NUM: Self = Self(8);
    pub const SET_VRING_ADDR: Self = Self(9);
    pub const SET_VRING_BASE: Self = Self(10);
    pub const GET_VRING_BASE: Self = Self(11);
    pub const SET_VRING_KICK: Self = Self(12);
    pub const SET_VRING_CALL: Self = Self(13);
    pub const SET_VRING_ERR: Self = Self(14);
    pub const GET_PROTOCOL_FEATURES: Self = Self(15);
    pub const SET_PROTOCOL_FEATURES: Self = Self(16);
    pub const GET_QUEUE_NUM: Self = Self(17);
    pub const SET_VRING_ENABLE: Self = Self(18);
    pub const SET_BACKEND_REQ_FD: Self = Self(21);
    pub const GET_CONFIG: Self = Self(24);
    pub const SET_CONFIG: Self = Self(25);
    pub const GET_INFLIGHT_FD: Self = Self(31);
    pub const SET_INFLIGHT_FD: Self = Self(32);
    pub const GET_MAX_MEM_SLOTS: Self = Self(36);
    pub const ADD_MEM_REG: Self = Self(37);
    pub const REM_MEM_REG: Self = Self(38);
}

/// Allowed form of a message type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MessageRule {
    pub(crate) code: MessageType,
    pub(crate) name: &'static str,
    /// Smallest and largest payload in bytes.
    pub(crate) payload_bytes: (u32, u32),
    /// Smallest and largest number of descriptors.
    pub(crate) with_files: (usize, usize),
    /// Whether the message has a reply of its own.
    pub(crate) is_question: bool,
    /// Protocol features that must be negotiated first.
    pub(crate) with_required_feature: u64,
}

/// Largest number of regions in SET_MEM_TABLE.
pub(crate) const TABLE_MAX: usize = 8;
/// Size of a region description in bytes.
pub(crate) const AREA_BYTES: usize = 32;
/// Largest accessible part of configuration space (VHOST_USER_MAX_CONFIG_SIZE).
pub(crate) const CONFIG_MAX: u32 = 256;
/// Size of the fields in front of it.
pub(crate) const CONFIG_FIELDS: u32 = 12;
/// Largest payload of an unknown message that is skipped.
pub(crate) const PAYLOAD_BYTES_MAX: u32 = 512;

const TABLE_BYTES_MAX: u32 = 264;

const _: () = assert!(TABLE_BYTES_MAX as usize == 8 + TABLE_MAX * AREA_BYTES);

impl MessageRule {
    const fn setter(code: MessageType, name: &'static str, bytes: u32) -> Self {
        let payload_bytes = (bytes, bytes);
        Self {
            code,
            name,
            payload_bytes,
            with_files: (0, 0),
            is_question: false,
            with_required_feature: 0,
        }
    }

    const fn query(code: MessageType, name: &'static str, bytes: u32) -> Self {
        Self { is_question: true, ..Self::setter(code, name, bytes) }
    }

    const fn with_files(self, least: usize, most: usize) -> Self {
        Self { with_files: (least, most), ..self }
    }

    const fn with_payload_max(self, bytes_max: u32) -> Self {
        Self { payload_bytes: (self.payload_bytes.0, bytes_max), ..self }
    }

    const fn with_required_feature(self, needs: u64) -> Self {
        Self { with_required_feature: needs, ..self }
    }
}

/// Allowed forms of all supported messages.
pub(crate) const RULES: [MessageRule; 24] = [
    MessageRule::query(MessageType::GET_FEATURES, "GET_FEATURES", 0),
    MessageRule::setter(MessageType::SET_FEATURES, "SET_FEATURES", 8),
    MessageRule::setter(MessageType::SET_OWNER, "SET_OWNER", 0),
    MessageRule::setter(MessageType::RESET_OWNER, "RESET_OWNER", 0),
    MessageRule::setter(MessageType::SET_MEM_TABLE, "SET_MEM_TABLE", 8)
        .with_payload_max(TABLE_BYTES_MAX)
        .with_files(0, TABLE_MAX),
    MessageRule::setter(MessageType::SET_VRING_NUM, "SET_VRING_NUM", 8),
    MessageRule::setter(MessageType::SET_VRING_ADDR, "SET_VRING_ADDR", 40),
    MessageRule::setter(MessageType::SET_VRING_BASE, "SET_VRING_BASE", 8),
    MessageRule::query(MessageType::GET_VRING_BASE, "GET_VRING_BASE", 8),
    MessageRule::setter(MessageType::SET_VRING_KICK, "SET_VRING_KICK", 8).with_files(0, 1),
    MessageRule::setter(MessageType::SET_VRING_CALL, "SET_VRING_CALL", 8).with_files(0, 1),
    MessageRule::setter(MessageType::SET_VRING_ERR, "SET_VRING_ERR", 8).with_files(0, 1),
    MessageRule::query(MessageType::GET_PROTOCOL_FEATURES, "GET_PROTOCOL_FEATURES", 0),
    MessageRule::setter(MessageType::SET_PROTOCOL_FEATURES, "SET_PROTOCOL_FEATURES", 8),
    MessageRule::query(MessageType::GET_QUEUE_NUM, "GET_QUEUE_NUM", 0).with_required_feature(MQ),
    MessageRule::setter(MessageType::SET_VRING_ENABLE, "SET_VRING_ENABLE", 8),
    MessageRule::setter(MessageType::SET_BACKEND_REQ_FD, "SET_BACKEND_REQ_FD", 0)
        .with_files(1, 1)
        .with_required_feature(BACKEND_REQ),
    MessageRule::query(MessageType::GET_CONFIG, "GET_CONFIG", CONFIG_FIELDS)
        .with_payload_max(CONFIG_FIELDS + CONFIG_MAX)
        .with_required_feature(CONFIG),
    MessageRule::setter(MessageType::SET_CONFIG, "SET_CONFIG", CONFIG_FIELDS)
        .with_payload_max(CONFIG_FIELDS + CONFIG_MAX)
        .with_required_feature(CONFIG),
    // The two counts at the end take 4 bytes; some compilers add 4 bytes of padding.
    MessageRule::query(MessageType::GET_INFLIGHT_FD, "GET_INFLIGHT_FD", 20)
        .with_payload_max(24)
        .with_required_feature(INFLIGHT_SHMFD),
    MessageRule::setter(MessageType::SET_INFLIGHT_FD, "SET_INFLIGHT_FD", 20)
        .with_payload_max(24)
        .with_files(1, 1)
        .with_required_feature(INFLIGHT_SHMFD),
    MessageRule::query(MessageType::GET_MAX_MEM_SLOTS, "GET_MAX_MEM_SLOTS", 0)
        .with_required_feature(CONFIGURE_MEM_SLOTS),
    MessageRule::setter(MessageType::ADD_MEM_REG, "ADD_MEM_REG", 40)
        .with_files(1, 1)
        .with_required_feature(CONFIGURE_MEM_SLOTS),
    MessageRule::setter(MessageType::REM_MEM_REG, "REM_MEM_REG", 40)
        .with_files(0, 1)
        .with_required_feature(CONFIGURE_MEM_SLOTS),
];

impl MessageType {
    pub(crate) fn rule(self) -> Option<&'static MessageRule> {
        RULES.iter().find(|rule| rule.code == self)
    }
}

impl fmt::Display for MessageType {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rule() {
            Some(rule) => out.write_str(rule.name),
            None => write!(out, "message {}", self.0),
        }
    }
}
