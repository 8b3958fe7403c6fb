//! Windowed copy between host memory ranges and a controller-side buffer.
//!
//! A host access may complete at once or many iterations later and in any order. Up to [`WINDOW`]
//! accesses are in flight at a time, each with an access identifier and its own part of the buffer. A
//! failed access fails the copy, but only after the other accesses have completed: until then the host
//! may still write into the buffer.

use tenmil_base::{AccessCompletion, AccessId, AccessProgress, HostMemory, Memory, Segment};

use super::{Direction, HostRanges};

/// Host-memory copy in progress.
#[derive(Debug)]
pub(crate) struct HostCopy {
    /// Range that holds the next byte, and the offset in it.
    range: usize,
    range_offset: u32,
    /// Bytes for which no access has been started.
    left: u32,
    /// Buffer offset of the next byte.
    at: u32,
    accesses: [PendingAccess; WINDOW],
    /// One bit for each access in flight.
    in_flight_mask: u8,
    has_failed: bool,
}

/// State of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyState {
    /// Every byte has been copied.
    Done,
    /// Accesses are in flight.
    Waiting,
    /// The host memory is not accessible, and no access is in flight anymore.
    Failed,
}

/// Controller-side source or destination.
pub(crate) enum LocalBuffer<'a> {
    /// Ordinary bytes.
    Bytes(&'a mut [u8]),
    /// A bounce buffer.
    Buffer(&'a dyn Memory, Segment),
    /// A bounce buffer with which the host's bytes are compared.
    Expected { memory: &'a dyn Memory, segment: Segment, differs: &'a mut bool },
}

#[derive(Clone, Copy, Debug, Default)]
struct PendingAccess {
    at: u32,
    len_bytes: u32,
}

/// Maximum bytes of one access.
pub(crate) const ACCESS_BYTES_MAX: usize = 16 << 10;

/// Maximum accesses in flight. The low four bits of an access identifier belong to the copy; it uses the
/// lower half of the values, the owner may use the upper half.
const WINDOW: usize = 8;

impl HostCopy {
    /// An empty copy at the first range.
    pub(crate) fn new() -> Self {
        Self {
            range: 0,
            range_offset: 0,
            left: 0,
            at: 0,
            accesses: [PendingAccess::default(); WINDOW],
            in_flight_mask: 0,
            has_failed: false,
        }
    }

    /// Starts to copy the next `len_bytes`, to or from the start of the buffer. One copy runs at a time:
    /// a copy started while accesses of another are in flight fails, and so does the other.
    pub(crate) fn begin(&mut self, len_bytes: u32) {
        if self.in_flight_mask != 0 {
            return self.stop_new_accesses();
        }
        (self.left, self.at, self.has_failed) = (len_bytes, 0, false);
    }

    /// Whether accesses are in flight.
    pub(crate) fn has_accesses_in_flight(&self) -> bool {
        self.in_flight_mask != 0
    }

    /// Starts no more accesses. Accesses in flight still complete.
    pub(crate) fn stop_new_accesses(&mut self) {
        self.has_failed = true;
    }

    /// Starts accesses until the window is full. `scratch` is [`ACCESS_BYTES_MAX`] long.
    pub(crate) fn start_accesses<H: HostMemory>(
        &mut self,
        host: &mut H,
        tickets: u32,
        ranges: &HostRanges,
        direction: Direction,
        target: &mut LocalBuffer<'_>,
        scratch: &mut [u8],
    ) -> CopyState {
        // The bits of `in_flight_mask` below the first zero are busy, so `trailing_ones` is the lowest free index.
        while self.left > 0 && !self.has_failed && self.in_flight_mask.trailing_ones() < WINDOW_BITS
        {
            let Some(range) = ranges.as_slice().get(self.range) else {
                self.has_failed = true;
                break;
            };
            let rest = range.len_bytes - self.range_offset;
            let len_max = if range.is_bucket { u32::MAX } else { ACCESS_U32 };
            let access = PendingAccess { at: self.at, len_bytes: rest.min(self.left).min(len_max) };
            if !range.is_bucket {
                let iova = range.iova + u64::from(self.range_offset);
                let bytes = &mut scratch[..access.len_bytes as usize];
                let index = self.in_flight_mask.trailing_ones();
                let ticket = AccessId(tickets | index);
                let progress = match direction {
                    Direction::FromHost => host.read(ticket, iova, bytes).ok(),
                    Direction::ToHost if target.read_bytes(access.at, bytes) => {
                        host.write(ticket, iova, bytes).ok()
                    }
                    Direction::ToHost => None,
                };
                match progress {
                    Some(AccessProgress::Pending) => {
                        self.accesses[index as usize] = access;
                        self.in_flight_mask |= 1 << index;
                    }
                    Some(AccessProgress::Done) if direction == Direction::FromHost => {
                        self.has_failed |= !target.write_bytes(access.at, bytes);
                    }
                    Some(AccessProgress::Done) => {}
                    None => self.has_failed = true,
                }
            }
            self.advance(access.len_bytes, range.len_bytes);
        }
        match (self.in_flight_mask, self.has_failed) {
            (0, true) => CopyState::Failed,
            (0, false) if self.left == 0 => CopyState::Done,
            _ => CopyState::Waiting,
        }
    }

    /// Handles the completion of an access.
    pub(crate) fn handle_access_completion<H: HostMemory>(
        &mut self,
        host: &mut H,
        ended: AccessCompletion,
        direction: Direction,
        target: &mut LocalBuffer<'_>,
        scratch: &mut [u8],
    ) {
        let index = ended.id.0 & 0xf;
        if index >= WINDOW_BITS || self.in_flight_mask & (1 << index) == 0 {
            return;
        }
        self.in_flight_mask &= !(1 << index);
        let access = self.accesses[index as usize];
        match (ended.result, direction) {
            (Ok(()), Direction::FromHost) => {
                let bytes = &mut scratch[..access.len_bytes as usize];
                host.copy_out_read_data(ended.id, bytes);
                self.has_failed |= !target.write_bytes(access.at, bytes);
            }
            (Ok(()), Direction::ToHost) => {}
            (Err(_), _) => self.has_failed = true,
        }
    }

    fn advance(&mut self, len_bytes: u32, range_len_bytes: u32) {
        self.left -= len_bytes;
        self.at += len_bytes;
        self.range_offset += len_bytes;
        if self.range_offset == range_len_bytes {
            (self.range, self.range_offset) = (self.range + 1, 0);
        }
    }
}

const WINDOW_BITS: u32 = u8::BITS;
const ACCESS_U32: u32 = 16 << 10;
const _: () = assert!(WINDOW_BITS as usize == WINDOW && ACCESS_U32 as usize == ACCESS_BYTES_MAX);

impl LocalBuffer<'_> {
    /// Stores bytes from the host. Returns false if the range is outside the buffer.
    fn write_bytes(&mut self, at: u32, bytes: &[u8]) -> bool {
        match self {
            Self::Bytes(place) => {
                let place = place.get_mut(at as usize..at as usize + bytes.len());
                place.is_some_and(|place| {
                    place.copy_from_slice(bytes);
                    true
                })
            }
            Self::Buffer(memory, segment) => subsegment(*segment, at, bytes)
                .is_some_and(|part| memory.store(part, bytes).is_ok()),
            Self::Expected { memory, segment, differs } => {
                let Some(part) = subsegment(*segment, at, bytes) else { return false };
                **differs |= match segment_equals(*memory, part, bytes) {
                    Some(is_equal) => !is_equal,
                    None => return false,
                };
                true
            }
        }
    }

    /// Loads bytes for the host. Returns false if the range is outside the buffer.
    fn read_bytes(&self, at: u32, bytes: &mut [u8]) -> bool {
        match self {
            Self::Bytes(place) => {
                let place = place.get(at as usize..at as usize + bytes.len());
                place.is_some_and(|place| {
                    bytes.copy_from_slice(place);
                    true
                })
            }
            Self::Buffer(memory, segment) | Self::Expected { memory, segment, .. } => {
                subsegment(*segment, at, bytes).is_some_and(|part| memory.load(part, bytes).is_ok())
            }
        }
    }
}

fn subsegment(segment: Segment, at: u32, bytes: &[u8]) -> Option<Segment> {
    segment.slice(at, u32::try_from(bytes.len()).ok()?)
}

/// Compares a part of a buffer with `bytes` in small chunks, which avoids a second scratch buffer.
fn segment_equals(memory: &dyn Memory, part: Segment, bytes: &[u8]) -> Option<bool> {
    let mut here = [0; 256];
    for (index, chunk) in bytes.chunks(here.len()).enumerate() {
        let at = u32::try_from(index * here.len()).ok()?;
        let here = &mut here[..chunk.len()];
        memory.load(part.slice(at, u32::try_from(chunk.len()).ok()?)?, here).ok()?;
        if here != chunk {
            return Some(false);
        }
    }
    Some(true)
}
