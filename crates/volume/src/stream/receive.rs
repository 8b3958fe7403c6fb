//! Incremental decoder of a stream.

use crc_fast::Digest;

use super::{
    DATA_BLOCKS_MAX, Kind, MAGIC, StreamError, StreamErrorKind, StreamHead, StreamInfo,
    StreamRecord, VERSION, digest, head_sum, record_sum,
};
use crate::format::{BLOCK_BYTES, BLOCKS_MAX, UNIT_SHIFT_MAX, padded, unpadded};
use crate::layout::Layout;

/// Decoder of a stream.
///
/// ```text
///   wants() = 384 | handle(bytes) -> Begun | wants() = 32 | handle(bytes) -> More | …
/// ```
#[derive(Debug)]
pub struct Receiver {
    awaited: StreamState,
    blocks: u64,
    /// First block that the next record may contain.
    next: u64,
    records: u64,
    data_blocks: u64,
    sums: Digest,
    /// Number of bytes processed.
    at: u64,
}

/// The part of the stream expected next.
#[derive(Clone, Copy, Debug)]
enum StreamState {
    Head,
    Record,
    /// The data of this record.
    Data([u8; StreamRecord::BYTES], StreamRecord),
    Nothing,
}

/// Result of processing bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The contents of the stream are known.
    Begun(StreamInfo),
    /// More bytes are needed.
    More,
    /// The bytes just processed are the data of blocks from this one on.
    Data {
        /// First block.
        block: u64,
    },
    /// Blocks that read as zeroes.
    Hole {
        /// First block.
        block: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// The stream is complete and valid.
    Ended,
}

impl Default for Receiver {
    fn default() -> Self {
        Self::new()
    }
}

impl Receiver {
    /// A decoder at the start of a stream.
    pub fn new() -> Self {
        let (awaited, sums) = (StreamState::Head, digest());
        Self { awaited, blocks: 0, next: 0, records: 0, data_blocks: 0, sums, at: 0 }
    }

    /// Number of bytes needed next, at most 1 MiB; zero after the end.
    pub fn wants(&self) -> usize {
        match &self.awaited {
            StreamState::Head => StreamHead::BYTES,
            StreamState::Record => StreamRecord::BYTES,
            StreamState::Data(_, record) => {
                usize::try_from(record.blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES)
            }
            StreamState::Nothing => 0,
        }
    }

    /// Error for an input that ended before the end of the stream.
    pub fn cut(&self) -> StreamError {
        self.wrong(StreamErrorKind::Truncated)
    }

    /// Processes the next bytes, as many as [`wants`](Self::wants) returned.
    ///
    /// # Errors
    ///
    /// The error in them; the rest of the stream is meaningless then.
    pub fn handle(&mut self, bytes: &[u8]) -> Result<Event, StreamError> {
        if bytes.len() != self.wants() {
            return Err(self.cut());
        }
        let event = match self.awaited {
            StreamState::Head => self.handle_head(bytes)?,
            StreamState::Record => self.handle_record(bytes)?,
            StreamState::Data(head, record) => self.handle_data(&head, &record, bytes)?,
            StreamState::Nothing => Event::Ended,
        };
        self.at += bytes.len() as u64;
        Ok(event)
    }

    fn handle_head(&mut self, bytes: &[u8]) -> Result<Event, StreamError> {
        let head = StreamHead::decode(bytes);
        let expected = head_sum(bytes);
        if head.magic != MAGIC {
            return Err(self.wrong(StreamErrorKind::NotAStream));
        }
        if head.checksum != expected {
            let found = head.checksum;
            return Err(self.wrong(StreamErrorKind::Checksum { found, expected }));
        }
        if head.version != VERSION || head.incompatible != 0 {
            let (version, features) = (head.version, head.incompatible);
            return Err(self.wrong(StreamErrorKind::Newer { version, features }));
        }
        let sized = (1..=BLOCKS_MAX).contains(&head.blocks) && head.unit_shift <= UNIT_SHIFT_MAX;
        let named = |name: &[u8]| padded::<128>(&unpadded(name)).is_some();
        let based = head.base == 0 || named(&head.base_name);
        if !sized || head.uuid == 0 || !named(&head.name) || !based {
            return Err(self.wrong(StreamErrorKind::Contents));
        }
        self.blocks = head.blocks;
        self.sums.update(&head.checksum.to_le_bytes());
        self.awaited = StreamState::Record;
        Ok(Event::Begun(StreamInfo::of(&head)))
    }

    fn handle_record(&mut self, bytes: &[u8]) -> Result<Event, StreamError> {
        let record = StreamRecord::decode(bytes);
        let Some(kind) = Kind::from_code(record.kind) else {
            return Err(self.wrong(StreamErrorKind::Contents));
        };
        if kind == Kind::Data && (1..=DATA_BLOCKS_MAX).contains(&record.blocks) {
            let head = bytes.try_into().unwrap_or([0; StreamRecord::BYTES]);
            self.awaited = StreamState::Data(head, record);
            return Ok(Event::More);
        }
        if kind == Kind::Data {
            return Err(self.wrong(StreamErrorKind::Contents));
        }
        let sums = self.sums.finalize();
        self.take(&record, record_sum(bytes, &[]))?;
        if kind == Kind::Hole {
            self.advance(&record)?;
            return Ok(Event::Hole { block: record.block, blocks: record.blocks });
        }
        if (record.block, record.blocks) != (self.data_blocks, sums) {
            return Err(self.wrong(StreamErrorKind::Order));
        }
        self.awaited = StreamState::Nothing;
        Ok(Event::Ended)
    }

    fn handle_data(
        &mut self,
        head: &[u8],
        record: &StreamRecord,
        data: &[u8],
    ) -> Result<Event, StreamError> {
        self.take(record, record_sum(head, data))?;
        self.advance(record)?;
        self.data_blocks += record.blocks;
        self.awaited = StreamState::Record;
        Ok(Event::Data { block: record.block })
    }

    /// Checks the checksum and sequence number of a record.
    fn take(&mut self, record: &StreamRecord, expected: u32) -> Result<(), StreamError> {
        if record.checksum != expected {
            let found = record.checksum;
            return Err(self.wrong(StreamErrorKind::Checksum { found, expected }));
        }
        if record.sequence != self.records {
            return Err(self.wrong(StreamErrorKind::Order));
        }
        self.records += 1;
        self.sums.update(&record.checksum.to_le_bytes());
        Ok(())
    }

    /// Checks that records have ascending blocks, none after the end of the snapshot.
    fn advance(&mut self, record: &StreamRecord) -> Result<(), StreamError> {
        let end = record.block.checked_add(record.blocks).filter(|end| *end <= self.blocks);
        let Some(end) = end.filter(|_| record.blocks > 0 && record.block >= self.next) else {
            return Err(self.wrong(StreamErrorKind::Contents));
        };
        self.next = end;
        Ok(())
    }

    fn wrong(&self, wrong: StreamErrorKind) -> StreamError {
        // A record is only valid together with its data, so the error is at the start of the record.
        let doubted = match self.awaited {
            StreamState::Data(..) if wrong != StreamErrorKind::Truncated => {
                StreamRecord::BYTES as u64
            }
            _ => 0,
        };
        StreamError { at: self.at - doubted, wrong }
    }
}
