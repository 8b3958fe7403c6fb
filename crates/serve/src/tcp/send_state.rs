//! Transmit path of a connection: from the protocol engine to the stream.

use tenmil_base::{SendSlice, Stream, StreamError};
use tenmil_nvme_tcp::{Connection, ControllerConnection, DataPlacement, SendPiece};

use super::command_table::CommandTable;

/// Transmit state of a connection.
#[derive(Debug)]
pub(super) struct SendState {
    slices: Vec<SendSlice>,
    /// Bytes that the stream accepted, and the part of these that is no longer referenced.
    accepted: u64,
    released: u64,
    /// Whether the stream did not accept everything.
    is_blocked: bool,
}

/// Largest number of gathered sends in an iteration: one is usual; more are needed if the
/// connection has more to send than the engine queues at a time.
const SENDS_MAX: usize = 4;

impl SendState {
    pub(super) fn new() -> Self {
        Self { slices: Vec::new(), accepted: 0, released: 0, is_blocked: false }
    }

    /// Whether sending must wait for space in the stream.
    #[inline]
    pub(super) fn is_awaiting_send_space(&self) -> bool {
        self.is_blocked
    }

    /// Whether bytes are queued that were not offered to the stream.
    #[inline]
    pub(super) fn has_unsent(&self, end: &ControllerConnection) -> bool {
        let len = |piece: &SendPiece| match *piece {
            SendPiece::Headers { len_bytes, .. } | SendPiece::Payload { len_bytes, .. } => {
                u64::from(len_bytes)
            }
        };
        // The pieces begin with the bytes that the stream accepted but still references.
        let referenced = self.accepted - self.released;
        match referenced {
            0 => !end.send_pieces().is_empty(),
            _ => end.send_pieces().iter().map(len).sum::<u64>() > referenced,
        }
    }

    /// Whether the stream still references bytes that it accepted.
    #[inline]
    pub(super) fn has_kernel_references(&self) -> bool {
        self.accepted > self.released
    }

    /// Sends as much as the stream accepts. Returns the number of bytes.
    #[inline]
    pub(super) fn send_queued(
        &mut self,
        stream: &mut dyn Stream,
        end: &mut ControllerConnection,
        commands: &mut CommandTable,
    ) -> Result<usize, StreamError> {
        let mut total_sent = 0;
        for _ in 0..SENDS_MAX {
            end.fill_send_queue(commands);
            let total = self.gather_unsent(end, commands)?;
            if total == 0 {
                self.is_blocked = false;
                break;
            }
            let sent = stream.send(end.header_bytes(), &self.slices, end.has_more())?;
            self.accepted += sent as u64;
            total_sent += sent;
            self.release_sent(stream, end, commands);
            self.is_blocked = sent == 0;
            if self.is_blocked || (sent == total && !end.has_more()) {
                break;
            }
        }
        Ok(total_sent)
    }

    /// Releases data that the stream no longer references; returns the number of commands that this
    /// completes.
    #[inline]
    pub(super) fn release_sent(
        &mut self,
        stream: &mut dyn Stream,
        end: &mut ControllerConnection,
        commands: &mut CommandTable,
    ) -> usize {
        let released = stream.released_bytes();
        let count = usize::try_from(released - self.released).unwrap_or(usize::MAX);
        self.released = released;
        let mut ended = 0;
        end.record_sent_each(count, |tag| {
            ended += 1;
            commands.release_command(tag);
        });
        ended
    }

    /// Gathers the data that the stream has not accepted yet; returns the number of bytes.
    #[inline]
    fn gather_unsent(
        &mut self,
        end: &ControllerConnection,
        commands: &CommandTable,
    ) -> Result<usize, StreamError> {
        self.slices.clear();
        let mut skip = u32::try_from(self.accepted - self.released).unwrap_or(u32::MAX);
        let mut total = 0;
        for piece in end.send_pieces() {
            let len = match *piece {
                SendPiece::Headers { len_bytes, .. } | SendPiece::Payload { len_bytes, .. } => {
                    len_bytes
                }
            };
            if skip >= len {
                skip -= len;
                continue;
            }
            let rest = len - skip;
            self.slices.push(match *piece {
                SendPiece::Headers { at, .. } => {
                    SendSlice::Headers { at: at + skip, len_bytes: rest }
                }
                SendPiece::Payload { tag, offset, .. } => {
                    let placement = DataPlacement { tag, offset: offset + skip, len_bytes: rest };
                    SendSlice::Memory(
                        commands
                            .send_segment(placement)
                            .ok_or_else(|| missing_buffer_error(placement))?,
                    )
                }
            });
            skip = 0;
            total += rest as usize;
        }
        Ok(total)
    }
}

/// Error for data without memory: a command keeps its memory until its data are sent.
#[cold]
fn missing_buffer_error(placement: DataPlacement) -> StreamError {
    let DataPlacement { tag, offset, len_bytes } = placement;
    StreamError(format!("{len_bytes} bytes from {offset} of command {tag} have no buffer"))
}
