//! Transmit path of a connection: from the protocol engine to the stream.

use tenmil_base::{SendSlice, Stream, StreamError};
use tenmil_nvme_tcp::{Connection, ControllerConnection, DataPlacement, SendPiece};

use super::command_table::CommandTable;

/// Transmit state of a connection.
#[derive(Debug)]
pub(super) struct SendState {
    stretches: Vec<SendSlice>,
    /// Bytes that the stream accepted, and the part of these that is no longer referenced.
    taken: u64,
    told: u64,
    /// Whether the stream did not accept everything.
    is_blocked: bool,
}

/// Largest number of gathered sends in an iteration: one is usual; more are needed if the
/// connection has more to send than the engine queues at a time.
const SENDS_MAX: usize = 4;

impl SendState {
    pub(super) fn new() -> Self {
        Self { stretches: Vec::new(), taken: 0, told: 0, is_blocked: false }
    }

    /// Whether sending must wait for space in the stream.
    #[inline]
    pub(super) fn is_blocked(&self) -> bool {
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
        let read = self.taken - self.told;
        match read {
            0 => !end.pieces().is_empty(),
            _ => end.pieces().iter().map(len).sum::<u64>() > read,
        }
    }

    /// Whether the stream still references bytes that it accepted.
    #[inline]
    pub(super) fn is_read(&self) -> bool {
        self.taken > self.told
    }

    /// Sends as much as the stream accepts. Returns the number of bytes.
    #[inline]
    pub(super) fn send(
        &mut self,
        stream: &mut dyn Stream,
        end: &mut ControllerConnection,
        rooms: &mut CommandTable,
    ) -> Result<usize, StreamError> {
        let mut all = 0;
        for _ in 0..SENDS_MAX {
            end.fill_send_queue(rooms);
            let total = self.gather(end, rooms)?;
            if total == 0 {
                self.is_blocked = false;
                break;
            }
            let sent = stream.send(end.headers(), &self.stretches, end.has_more())?;
            self.taken += sent as u64;
            all += sent;
            self.handle_eof(stream, end, rooms);
            self.is_blocked = sent == 0;
            if self.is_blocked || (sent == total && !end.has_more()) {
                break;
            }
        }
        Ok(all)
    }

    /// Releases data that the stream no longer references; returns the number of commands that this
    /// completes.
    #[inline]
    pub(super) fn handle_eof(
        &mut self,
        stream: &mut dyn Stream,
        end: &mut ControllerConnection,
        rooms: &mut CommandTable,
    ) -> usize {
        let released = stream.released_bytes();
        let count = usize::try_from(released - self.told).unwrap_or(usize::MAX);
        self.told = released;
        let mut ended = 0;
        end.record_sent_each(count, |tag| {
            ended += 1;
            rooms.release(tag);
        });
        ended
    }

    /// Gathers the data that the stream has not accepted yet; returns the number of bytes.
    #[inline]
    fn gather(
        &mut self,
        end: &ControllerConnection,
        rooms: &CommandTable,
    ) -> Result<usize, StreamError> {
        self.stretches.clear();
        let mut skip = u32::try_from(self.taken - self.told).unwrap_or(u32::MAX);
        let mut total = 0;
        for piece in end.pieces() {
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
            self.stretches.push(match *piece {
                SendPiece::Headers { at, .. } => {
                    SendSlice::Headers { at: at + skip, len_bytes: rest }
                }
                SendPiece::Payload { tag, offset, .. } => {
                    let place = DataPlacement { tag, offset: offset + skip, len_bytes: rest };
                    SendSlice::Memory(rooms.segment(place).ok_or_else(|| no_buffer(place))?)
                }
            });
            skip = 0;
            total += rest as usize;
        }
        Ok(total)
    }
}

/// Error for data without a buffer: a command keeps its buffer until its data are sent.
#[cold]
fn no_buffer(place: DataPlacement) -> StreamError {
    let DataPlacement { tag, offset, len_bytes } = place;
    StreamError(format!("{len_bytes} bytes from {offset} of command {tag} lie in no buffer"))
}
