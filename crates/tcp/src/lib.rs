//! An NVMe/TCP connection, both ends: bytes in, events out.
//!
//! ```text
//!             Host                                             Controller
//!   submit ──▶ slots ──▶ outbox ─ pieces ─▶ bytes ─▶ receive ──▶ slots ──▶ Command, Data, Arrived
//!                                                                 │  grant, reply, finish
//!   Data, Done ◀── slots ◀── receive ◀─ bytes ◀─ pieces ─ outbox ◀┘
//! ```
//!
//! Nothing here does I/O, reads a clock or holds a payload. An end is given what has come, in one
//! slice, and says by [`Events`] what that means: which command, which bytes of the slice belong
//! where. What it has to send is a list of [`Piece`]s: headers, which lie with it, and payload,
//! which is named by command and offset and lies with the owner. So payload is copied once if it
//! came in the same buffer as headers, and never if the socket reads it straight to the [`Place`]
//! that [`Connection::direct`] names.
//!
//! Bytes that are not taken are given again, with more behind them. Where the stream is cut changes
//! nothing but how many pieces `Data` comes in.
//!
//! All tables are made when an end is made, and nothing is allocated afterwards. A full table is
//! backpressure. What one takes is told by [`HostConfig::memory_bytes`] and
//! [`ControllerConfig::memory_bytes`].
//!
//! What is refused, with which fatal status, is in [`wire::tcp::rule`]; sections are those of the
//! TCP Transport Specification, revision 1.0.
//!
//! # How `nvme` will stand on the host end
//!
//! A queue pair over TCP is a [`Host`] instead of two rings. Its tag is the slot index, which `nvme`
//! already uses as command identifier, so tokens, segments and deadlines stay in the slots that are
//! there; `submit` takes the same [`Command`](wire::Command) with the length and direction of its
//! data in place of PRPs, `Done` is the completion entry, and the ladder of resets sees a connection
//! that ended where it sees a controller that vanished. Bring-up talks to an admin queue and to
//! registers: over fabrics the registers are Property Get and Set on that same queue, so what
//! bring-up needs is a seam with two calls, "submit an admin command" and "here is a completion",
//! behind which either a ring with registers or a [`Host`] stands; Connect comes first on each
//! connection and yields CNTLID.
//!
//! # How `ctrl` will stand on the controller end
//!
//! A `ctrl::Queue` takes commands from a ring and reaches data through
//! [`HostMemory`](base::HostMemory). Over TCP the ring is [`ControllerEvent::Command`], and the host's
//! memory is one that answers later, which that seam already allows: a read by the queue of a
//! command's data is `grant`, and its ticket ends with `Arrived`; a write is `reply` or the last
//! piece of `finish`, and its ticket ends at once, since the bytes lie in the target's buffers until
//! `Released`. In-capsule data are there before the queue sees the command. Admin commands go to
//! `ctrl::Controller` the same way, and Connect, properties and Disconnect stay with the target,
//! which owns the association.

#![forbid(unsafe_code)]

mod body;
mod connection;
pub mod controller;
mod events;
pub mod fuzz;
pub mod host;
mod line;
mod outbox;
#[cfg(test)]
mod tests;

pub use body::Place;
pub use connection::Connection;
pub use controller::{
    CommandData, Controller, ControllerConfig, ControllerEvent, NotPossible, QueueKind, SuccessFlag,
};
pub use events::{EVENTS_PER_UNIT, Events};
pub use host::{Data, DigestUse, Full, Host, HostConfig, HostEvent};
pub use line::{Cause, Line, Patience};
pub use outbox::Piece;

/// The data of commands, as far as an end must see them: for their digest.
///
/// It is asked once for each unit with data, when the unit is queued, and only on a connection with
/// data digests. From then on until the unit has been sent the bytes must not change.
pub trait Payloads {
    /// CRC32C of `len_bytes` of the data of command `tag`, from `offset` on.
    fn digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32;
}

/// The payloads of a connection that has no data digests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Undigested;

impl Payloads for Undigested {
    fn digest(&self, _: u16, _: u32, _: u32) -> u32 {
        unreachable!("no data digests were agreed upon")
    }
}

/// What was agreed upon when the connection was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// A digest follows each header.
    pub header_digest: bool,
    /// A digest follows all data.
    pub data_digest: bool,
    /// HPDA: how data to the host are aligned.
    pub hpda: u8,
    /// CPDA: how data to the controller are aligned.
    pub cpda: u8,
    /// R2Ts that may be outstanding for a command.
    pub r2ts_max: u32,
    /// MAXH2CDATA: the most data in one H2CData.
    pub h2c_bytes_max: u32,
}

impl Terms {
    /// How units to the host are framed.
    pub(crate) const fn to_host(self) -> wire::tcp::Framing {
        self.framing(self.hpda)
    }

    /// How units to the controller are framed.
    pub(crate) const fn to_controller(self) -> wire::tcp::Framing {
        self.framing(self.cpda)
    }

    const fn framing(self, alignment: u8) -> wire::tcp::Framing {
        let Self { header_digest, data_digest, .. } = self;
        wire::tcp::Framing { header_digest, data_digest, alignment }
    }
}
