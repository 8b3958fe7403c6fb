//! NVMe/TCP protocol, both ends, without I/O: bytes in, events out.
//!
//! ```text
//!                     Host                                               Controller
//!   submit ─────────▶ slots ─▶ send queue ─ pieces ─▶ bytes ─▶ receive ─▶ slots ─▶ Command, Data, DataComplete
//!                                                                          │  request_data, send_data, complete
//!   Data, Completed ◀─ slots ◀─ receive ◀─ bytes ◀─ pieces ─ send queue ◀──┘
//! ```
//!
//! Nothing here does I/O, reads a clock or holds payload. An end parses received bytes, passed as
//! one slice, and adds events to an [`EventQueue`]: commands, and the ranges of the slice that are data.
//! Its output is a list of [`SendPiece`]s: headers, which it stores, and payload, which is named by tag and
//! offset and stored by the owner. Payload is therefore copied once if it was received into the
//! same buffer as headers, and never if the socket receives it directly into the [`DataPlacement`] that
//! [`Connection::next_direct_placement`] names.
//!
//! Bytes that were not consumed are passed again, followed by more. Fragmentation of the stream
//! changes nothing but the number of `Data` events.
//!
//! All tables have a fixed limit, and a full table is backpressure. The memory of an end is bounded
//! by [`HostConfig::memory_bytes`] and [`ControllerConfig::memory_bytes`].
//!
//! The checks of received PDUs, with the fatal error status of each, are in [`tenmil_wire::tcp::validation_rules`].
//! Section numbers refer to the NVMe TCP Transport Specification, revision 1.0.
//!
//! # Users
//!
//! The crate `nvme-fabrics` drives a [`HostConnection`] for each queue: it is the transport of an I/O queue
//! pair of the NVMe driver, whose commands are submitted here under the driver's identifiers, and
//! [`HostEvent::Completed`] or [`HostEvent::ReadCompleted`] ends them. A lost connection appears to the
//! driver as a controller that has disappeared.
//!
//! The crate `serve` drives a [`ControllerConnection`] for each connection: a command begins in an
//! `Executor` of `tenmil_nvme_controller` under its tag once its buffer is allocated and its data have arrived
//! ([`ControllerEvent::DataComplete`]), and its completion is sent with
//! [`ControllerConnection::complete`]. Connect, Disconnect and properties are handled by the target itself,
//! which owns the association.

#![forbid(unsafe_code)]

mod connection_trait;
pub mod controller;
mod endpoint;
mod events;
pub mod fuzz;
pub mod host;
mod pdu_body;
mod receive_loop;
mod send_queue;
#[cfg(test)]
mod tests;

pub use connection_trait::Connection;
pub use controller::{
    ControllerConfig, ControllerConnection, ControllerEvent, DataTransfer, OwnerCallError,
    QueueKind, SuccessFlagPolicy,
};
pub use endpoint::{CloseReason, ConnectionCore, Timeouts};
pub use events::{EVENTS_PER_PDU, EventQueue};
pub use host::{CannotSubmit, DataDirection, DigestMode, HostConfig, HostConnection, HostEvent};
pub use pdu_body::DataPlacement;
pub use send_queue::SendPiece;

/// Access to the payload of commands, for data digests.
///
/// It is called once for each PDU with data, when the PDU is queued, and only on a connection with
/// data digests. From then until the PDU has been sent the bytes must not change.
pub trait PayloadDigest {
    /// Returns the CRC32C of `len_bytes` of the data of command `tag`, starting at `offset`.
    fn data_digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32;
}

/// Payload access of a connection without data digests.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoDigest;

impl PayloadDigest for NoDigest {
    fn data_digest(&self, _: u16, _: u32, _: u32) -> u32 {
        unreachable!("data digests were not negotiated")
    }
}

/// Parameters negotiated with ICReq and ICResp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NegotiatedParams {
    /// Whether header digests are in use.
    pub header_digest: bool,
    /// Whether data digests are in use.
    pub data_digest: bool,
    /// HPDA: alignment of data to the host.
    pub hpda: u8,
    /// CPDA: alignment of data to the controller.
    pub cpda: u8,
    /// Largest number of outstanding R2Ts per command.
    pub r2ts_max: u32,
    /// MAXH2CDATA: largest data of an H2CData PDU in bytes.
    pub h2c_bytes_max: u32,
}

impl NegotiatedParams {
    /// Framing of PDUs to the host.
    pub(crate) const fn framing_to_host(self) -> tenmil_wire::tcp::PduFraming {
        self.framing(self.hpda)
    }

    /// Framing of PDUs to the controller.
    pub(crate) const fn framing_to_controller(self) -> tenmil_wire::tcp::PduFraming {
        self.framing(self.cpda)
    }

    const fn framing(self, alignment: u8) -> tenmil_wire::tcp::PduFraming {
        let Self { header_digest, data_digest, .. } = self;
        tenmil_wire::tcp::PduFraming { header_digest, data_digest, alignment }
    }
}
