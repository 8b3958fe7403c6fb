//! A stream, taken apart as it comes.

use crc_fast::Digest;

use super::{
    Contents, DATA_BLOCKS_MAX, Kind, MAGIC, StreamError, StreamHead, StreamRecord, VERSION, Wrong,
    digest, head_sum, record_sum,
};
use crate::format::{BLOCK_BYTES, BLOCKS_MAX, UNIT_SHIFT_MAX, padded, unpadded};
use crate::layout::Layout;

/// Takes a stream apart.
///
/// ```text
///   wants() = 384 | handle(bytes) -> Begun | wants() = 32 | handle(bytes) -> More | …
/// ```
#[derive(Debug)]
pub struct Receiver {
    awaited: Awaited,
    blocks: u64,
    /// The first block that a record may still be about.
    next: u64,
    records: u64,
    data_blocks: u64,
    sums: Digest,
    /// Bytes that were handled.
    at: u64,
}

/// What is awaited.
#[derive(Clone, Copy, Debug)]
enum Awaited {
    Head,
    Record,
    /// The data of this record.
    Data([u8; StreamRecord::BYTES], StreamRecord),
    Nothing,
}

/// What bytes have said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// What the stream holds.
    Begun(Contents),
    /// Nothing yet.
    More,
    /// The bytes just handled are those of blocks from this one on.
    Data {
        /// The first block.
        block: u64,
    },
    /// Blocks read as zeroes.
    Hole {
        /// The first block.
        block: u64,
        /// How many.
        blocks: u64,
    },
    /// That was all, and it was whole.
    Ended,
}

impl Default for Receiver {
    fn default() -> Self {
        Self::new()
    }
}

impl Receiver {
    /// One that awaits the beginning.
    pub fn new() -> Self {
        let (awaited, sums) = (Awaited::Head, digest());
        Self { awaited, blocks: 0, next: 0, records: 0, data_blocks: 0, sums, at: 0 }
    }

    /// How many bytes it wants to be given next, a megabyte at most; zero once it has ended.
    pub fn wants(&self) -> usize {
        match &self.awaited {
            Awaited::Head => StreamHead::BYTES,
            Awaited::Record => StreamRecord::BYTES,
            Awaited::Data(_, record) => {
                usize::try_from(record.blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES)
            }
            Awaited::Nothing => 0,
        }
    }

    /// The stream has come to an end before its end.
    pub fn cut(&self) -> StreamError {
        self.wrong(Wrong::Cut)
    }

    /// The next bytes, as many as it wants.
    ///
    /// # Errors
    ///
    /// What is wrong with them; nothing that follows means anything then.
    pub fn handle(&mut self, bytes: &[u8]) -> Result<Event, StreamError> {
        if bytes.len() != self.wants() {
            return Err(self.cut());
        }
        let event = match self.awaited {
            Awaited::Head => self.handle_head(bytes)?,
            Awaited::Record => self.handle_record(bytes)?,
            Awaited::Data(head, record) => self.handle_data(&head, &record, bytes)?,
            Awaited::Nothing => Event::Ended,
        };
        self.at += bytes.len() as u64;
        Ok(event)
    }

    fn handle_head(&mut self, bytes: &[u8]) -> Result<Event, StreamError> {
        let head = StreamHead::decode(bytes);
        let expected = head_sum(bytes);
        if head.magic != MAGIC {
            return Err(self.wrong(Wrong::NoStream));
        }
        if head.checksum != expected {
            let found = head.checksum;
            return Err(self.wrong(Wrong::Checksum { found, expected }));
        }
        if head.version != VERSION || head.incompatible != 0 {
            let (version, features) = (head.version, head.incompatible);
            return Err(self.wrong(Wrong::Newer { version, features }));
        }
        let sized = (1..=BLOCKS_MAX).contains(&head.blocks) && head.unit_shift <= UNIT_SHIFT_MAX;
        let named = |name: &[u8]| padded::<128>(&unpadded(name)).is_some();
        let based = head.base == 0 || named(&head.base_name);
        if !sized || head.uuid == 0 || !named(&head.name) || !based {
            return Err(self.wrong(Wrong::Contents));
        }
        self.blocks = head.blocks;
        self.sums.update(&head.checksum.to_le_bytes());
        self.awaited = Awaited::Record;
        Ok(Event::Begun(Contents::of(&head)))
    }

    fn handle_record(&mut self, bytes: &[u8]) -> Result<Event, StreamError> {
        let record = StreamRecord::decode(bytes);
        let Some(kind) = Kind::from_code(record.kind) else {
            return Err(self.wrong(Wrong::Contents));
        };
        if kind == Kind::Data && (1..=DATA_BLOCKS_MAX).contains(&record.blocks) {
            let head = bytes.try_into().unwrap_or([0; StreamRecord::BYTES]);
            self.awaited = Awaited::Data(head, record);
            return Ok(Event::More);
        }
        if kind == Kind::Data {
            return Err(self.wrong(Wrong::Contents));
        }
        let sums = self.sums.finalize();
        self.take(&record, record_sum(bytes, &[]))?;
        if kind == Kind::Hole {
            self.advance(&record)?;
            return Ok(Event::Hole { block: record.block, blocks: record.blocks });
        }
        if (record.block, record.blocks) != (self.data_blocks, sums) {
            return Err(self.wrong(Wrong::Order));
        }
        self.awaited = Awaited::Nothing;
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
        self.awaited = Awaited::Record;
        Ok(Event::Data { block: record.block })
    }

    /// Compares a record's checksum and its place among the others.
    fn take(&mut self, record: &StreamRecord, expected: u32) -> Result<(), StreamError> {
        if record.checksum != expected {
            let found = record.checksum;
            return Err(self.wrong(Wrong::Checksum { found, expected }));
        }
        if record.sequence != self.records {
            return Err(self.wrong(Wrong::Order));
        }
        self.records += 1;
        self.sums.update(&record.checksum.to_le_bytes());
        Ok(())
    }

    /// Records are about ever later blocks, none behind the snapshot's end.
    fn advance(&mut self, record: &StreamRecord) -> Result<(), StreamError> {
        let end = record.block.checked_add(record.blocks).filter(|end| *end <= self.blocks);
        let Some(end) = end.filter(|_| record.blocks > 0 && record.block >= self.next) else {
            return Err(self.wrong(Wrong::Contents));
        };
        self.next = end;
        Ok(())
    }

    fn wrong(&self, wrong: Wrong) -> StreamError {
        // What belongs together is right together.
        let doubted = match self.awaited {
            Awaited::Data(..) if wrong != Wrong::Cut => StreamRecord::BYTES as u64,
            _ => 0,
        };
        StreamError { at: self.at - doubted, wrong }
    }
}
