//! Incremental decoder of a stream.

use tenmil_crc::Crc32c;

use super::{
    DATA_BLOCKS_MAX, MAGIC, RecordKind, StreamError, StreamErrorKind, StreamHead, StreamInfo,
    StreamRecord, VERSION, head_checksum, record_checksum,
};
use crate::format::{BLOCK_BYTES, BLOCKS_MAX, UNIT_SHIFT_MAX, decode_name, encode_name};
use crate::on_disk_layout::Layout;

/// Decoder of a stream.
///
/// ```text
///   wants() = 384 | handle(bytes) -> Begun | wants() = 32 | handle(bytes) -> More | …
/// ```
#[derive(Debug)]
pub struct StreamParser {
    awaited: StreamState,
    blocks: u64,
    /// First block that the next record may contain.
    next: u64,
    records: u64,
    data_blocks: u64,
    sums: Crc32c,
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
pub enum StreamEvent {
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

impl Default for StreamParser {
    fn default() -> Self {
        Self::new()
    }
}

impl StreamParser {
    /// A decoder at the start of a stream.
    pub fn new() -> Self {
        let (awaited, sums) = (StreamState::Head, Crc32c::new());
        Self { awaited, blocks: 0, next: 0, records: 0, data_blocks: 0, sums, at: 0 }
    }

    /// Number of bytes needed next, at most 1 MiB; zero after the end.
    pub fn bytes_needed(&self) -> usize {
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
    pub fn truncated_error(&self) -> StreamError {
        self.error_at_record(StreamErrorKind::Truncated)
    }

    /// Processes the next bytes, as many as [`bytes_needed`](Self::bytes_needed) returned.
    ///
    /// # Errors
    ///
    /// The error in them; the rest of the stream is meaningless then.
    pub fn handle(&mut self, bytes: &[u8]) -> Result<StreamEvent, StreamError> {
        if bytes.len() != self.bytes_needed() {
            return Err(self.truncated_error());
        }
        let event = match self.awaited {
            StreamState::Head => self.handle_head(bytes)?,
            StreamState::Record => self.handle_record(bytes)?,
            StreamState::Data(head, record) => self.handle_data(&head, &record, bytes)?,
            StreamState::Nothing => StreamEvent::Ended,
        };
        self.at += bytes.len() as u64;
        Ok(event)
    }

    fn handle_head(&mut self, bytes: &[u8]) -> Result<StreamEvent, StreamError> {
        let head = StreamHead::decode(bytes);
        let expected = head_checksum(bytes);
        if head.magic != MAGIC {
            return Err(self.error_at_record(StreamErrorKind::NotAStream));
        }
        if head.checksum != expected {
            let found = head.checksum;
            return Err(self.error_at_record(StreamErrorKind::Checksum { found, expected }));
        }
        if head.version != VERSION || head.incompatible != 0 {
            let (version, features) = (head.version, head.incompatible);
            return Err(self.error_at_record(StreamErrorKind::Newer { version, features }));
        }
        let sized = (1..=BLOCKS_MAX).contains(&head.blocks) && head.unit_shift <= UNIT_SHIFT_MAX;
        let named = |name: &[u8]| encode_name::<128>(&decode_name(name)).is_some();
        let based = head.base == 0 || named(&head.base_name);
        if !sized || head.uuid == 0 || !named(&head.name) || !based {
            return Err(self.error_at_record(StreamErrorKind::Contents));
        }
        self.blocks = head.blocks;
        self.sums.update(&head.checksum.to_le_bytes());
        self.awaited = StreamState::Record;
        Ok(StreamEvent::Begun(StreamInfo::from_head(&head)))
    }

    fn handle_record(&mut self, bytes: &[u8]) -> Result<StreamEvent, StreamError> {
        let record = StreamRecord::decode(bytes);
        let Some(kind) = RecordKind::from_code(record.kind) else {
            return Err(self.error_at_record(StreamErrorKind::Contents));
        };
        if kind == RecordKind::Data && (1..=DATA_BLOCKS_MAX).contains(&record.blocks) {
            let head = bytes.try_into().unwrap_or([0; StreamRecord::BYTES]);
            self.awaited = StreamState::Data(head, record);
            return Ok(StreamEvent::More);
        }
        if kind == RecordKind::Data {
            return Err(self.error_at_record(StreamErrorKind::Contents));
        }
        let sums = u64::from(self.sums.value());
        self.check_record(&record, record_checksum(bytes, &[]))?;
        if kind == RecordKind::Hole {
            self.check_order(&record)?;
            return Ok(StreamEvent::Hole { block: record.block, blocks: record.blocks });
        }
        if (record.block, record.blocks) != (self.data_blocks, sums) {
            return Err(self.error_at_record(StreamErrorKind::Order));
        }
        self.awaited = StreamState::Nothing;
        Ok(StreamEvent::Ended)
    }

    fn handle_data(
        &mut self,
        head: &[u8],
        record: &StreamRecord,
        data: &[u8],
    ) -> Result<StreamEvent, StreamError> {
        self.check_record(record, record_checksum(head, data))?;
        self.check_order(record)?;
        self.data_blocks += record.blocks;
        self.awaited = StreamState::Record;
        Ok(StreamEvent::Data { block: record.block })
    }

    /// Checks the checksum and sequence number of a record.
    fn check_record(&mut self, record: &StreamRecord, expected: u32) -> Result<(), StreamError> {
        if record.checksum != expected {
            let found = record.checksum;
            return Err(self.error_at_record(StreamErrorKind::Checksum { found, expected }));
        }
        if record.sequence != self.records {
            return Err(self.error_at_record(StreamErrorKind::Order));
        }
        self.records += 1;
        self.sums.update(&record.checksum.to_le_bytes());
        Ok(())
    }

    /// Checks that records have ascending blocks, none after the end of the snapshot.
    fn check_order(&mut self, record: &StreamRecord) -> Result<(), StreamError> {
        let end = record.block.checked_add(record.blocks).filter(|end| *end <= self.blocks);
        let Some(end) = end.filter(|_| record.blocks > 0 && record.block >= self.next) else {
            return Err(self.error_at_record(StreamErrorKind::Contents));
        };
        self.next = end;
        Ok(())
    }

    fn error_at_record(&self, wrong: StreamErrorKind) -> StreamError {
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
