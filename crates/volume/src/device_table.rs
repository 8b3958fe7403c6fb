//! Devices of a pool, and the location of its blocks on them.
//!
//! ```text
//!   blocks of the pool:   0                 first
//!                         | the first device | span: device 1   | span: device 2   | span: device 1  |
//!
//!   device 1:             | label | its first span              | its second span, where it grew      |
//! ```
//!
//! All superblocks are on the first device, and each of them has the complete table. The first device
//! therefore identifies the others, and shows whether one is missing. The others begin with a label that
//! identifies their pool. It is written once, before a superblock includes the device, and never again.

use std::ops::Range;

use crate::error::{CorruptionKind, PoolError};
use crate::format::{
    BLOCK_BYTES, BLOCKS_MAX, Block, BlockKind, DeviceRecord, Header, LabelBody, Page, PageBody,
    STORE_BLOCKS_MIN, SpanRecord, Superblock, URI_BYTES_MAX, decode_name, encode_name,
};
use crate::on_disk_layout::Layout;
use crate::parent::is_valid_uri;

/// Devices of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceTable {
    /// Initial blocks of the pool, at the start of the first device.
    pub first: u64,
    /// Spans after them, in order.
    pub spans: Vec<DeviceSpan>,
    /// All devices but the first; device 1 is the first of these.
    pub others: Vec<SecondaryDevice>,
}

/// Contiguous blocks of a pool on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpan {
    /// Device number; zero is the first.
    pub device: u32,
    /// Offset on the device, in blocks of 4 KiB.
    pub at: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// Device other than the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecondaryDevice {
    /// Random UUID, drawn when it was added.
    pub uuid: u128,
    /// URI under which it was last given.
    pub uri: String,
}

/// Label at the start of every device but the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLabel {
    /// UUID of the pool.
    pub store: u128,
    /// Name of the pool when the device was added.
    pub name: String,
    /// Number of the device in the pool.
    pub number: u32,
    /// Random UUID, drawn when it was added.
    pub uuid: u128,
    /// Generation of the transaction that was open then.
    pub generation: u64,
    /// First block of the pool after the label.
    pub begin: u64,
    /// URI of the first device then.
    pub first_uri: String,
}

/// Maximum number of devices, including the first.
pub const DEVICES_MAX: usize = 32;
/// Maximum number of spans.
pub const SPANS_MAX: usize = 63;
/// Blocks before the first span on each device but the first.
pub const LABEL_BLOCKS: u64 = 1;
/// Bytes after the superblock in its block.
pub(crate) const TABLE_BYTES: usize = BLOCK_BYTES - Header::BYTES - Superblock::BYTES;

impl DeviceTable {
    /// A single device with all blocks.
    pub const fn single(blocks: u64) -> Self {
        Self { first: blocks, spans: Vec::new(), others: Vec::new() }
    }

    /// Number of blocks on all devices.
    pub fn blocks(&self) -> u64 {
        self.spans.iter().fold(self.first, |sum, span| sum.saturating_add(span.blocks))
    }

    /// Number of devices.
    pub const fn count(&self) -> usize {
        1 + self.others.len()
    }

    /// All contiguous runs, each with its first block in the pool.
    pub fn spans_with_start(&self) -> impl Iterator<Item = (u64, DeviceSpan)> + '_ {
        let first = DeviceSpan { device: 0, at: 0, blocks: self.first };
        [first].into_iter().chain(self.spans.iter().copied()).scan(0, |begin, span| {
            let start = *begin;
            *begin += span.blocks;
            Some((start, span))
        })
    }

    /// Minimum size of a device in blocks.
    pub fn device_blocks_min(&self, device: u32) -> u64 {
        let own = self.spans_with_start().filter(|(_, span)| span.device == device);
        own.map(|(_, span)| span.at + span.blocks).max().unwrap_or(0)
    }

    /// Number of pool blocks on a device.
    pub fn pool_block_count_on(&self, device: u32) -> u64 {
        self.spans_with_start()
            .filter(|(_, span)| span.device == device)
            .map(|(_, span)| span.blocks)
            .sum()
    }

    /// First block of the pool after the label of a device.
    pub fn first_block_of(&self, device: u32) -> u64 {
        let begin = self.spans_with_start().find(|(_, span)| span.device == device);
        begin.map_or(0, |(begin, _)| begin)
    }

    /// Extends a device to `blocks` blocks: the gained blocks are appended to the pool. No effect if it
    /// has not grown.
    pub fn extend_device(&mut self, device: u32, blocks: u64) {
        let Some(gained @ 1..) = blocks.checked_sub(self.device_blocks_min(device)) else { return };
        let at = blocks - gained;
        match self.spans.last_mut() {
            None => self.first += gained,
            Some(last) if last.device == device => last.blocks += gained,
            Some(_) => self.spans.push(DeviceSpan { device, at, blocks: gained }),
        }
    }

    /// Adds a device with `blocks` blocks, including its label. Returns its number.
    pub fn add_device(&mut self, other: SecondaryDevice, blocks: u64) -> u32 {
        self.others.push(other);
        let device = u32::try_from(self.others.len()).unwrap_or(u32::MAX);
        let blocks = blocks.saturating_sub(LABEL_BLOCKS);
        self.spans.push(DeviceSpan { device, at: LABEL_BLOCKS, blocks });
        device
    }

    /// Checks that the table fits in a superblock and is within all limits.
    ///
    /// # Errors
    ///
    /// The violated limit.
    pub fn check(&self) -> Result<(), PoolError> {
        let blocks = self.blocks();
        if blocks > BLOCKS_MAX {
            return Err(PoolError::DeviceTooLarge { blocks });
        }
        let bytes = self.table_bytes();
        let is_few = self.count() <= DEVICES_MAX && self.spans.len() <= SPANS_MAX;
        if !is_few || bytes > TABLE_BYTES {
            let (devices, runs) = (self.count(), self.spans.len() + 1);
            return Err(PoolError::TooManyDevices { devices, runs, bytes });
        }
        match self.others.iter().find(|other| !is_valid_uri(&other.uri)) {
            Some(other) => Err(PoolError::BadDevice { uri: other.uri.clone() }),
            None => Ok(()),
        }
    }

    pub(crate) fn table_bytes(&self) -> usize {
        let names: usize = self.others.iter().map(|other| other.uri.len()).sum();
        self.others.len() * DeviceRecord::BYTES + self.spans.len() * SpanRecord::BYTES + names
    }

    /// Whether the spans of each device are in order and after its label, and every device has one.
    fn are_spans_in_order(&self) -> bool {
        let mut ends: Vec<u64> = vec![LABEL_BLOCKS; self.count()];
        ends[0] = self.first;
        let follows = self.spans.iter().all(|span| {
            let Some(end) = ends.get_mut(span.device as usize) else { return false };
            let is_behind = span.at >= *end && span.blocks > 0;
            *end = span.at.saturating_add(span.blocks);
            is_behind && *end <= BLOCKS_MAX
        });
        follows && ends[1..].iter().all(|end| *end > LABEL_BLOCKS)
    }

    /// Encodes the table after a superblock; `bytes` begin there.
    pub(crate) fn encode(&self, bytes: &mut [u8]) {
        if self.spans.is_empty() {
            return;
        }
        let (records, rest) = bytes.split_at_mut(self.others.len() * DeviceRecord::BYTES);
        let (spans, mut names) = rest.split_at_mut(self.spans.len() * SpanRecord::BYTES);
        for (other, record) in self.others.iter().zip(records.chunks_exact_mut(DeviceRecord::BYTES))
        {
            let uri_bytes = u32::try_from(other.uri.len()).unwrap_or(u32::MAX);
            DeviceRecord { uuid: other.uuid, uri_bytes, reserved: [0; 12] }.encode(record);
            let (name, behind) = names.split_at_mut(other.uri.len());
            name.copy_from_slice(other.uri.as_bytes());
            names = behind;
        }
        for (span, record) in self.spans.iter().zip(spans.chunks_exact_mut(SpanRecord::BYTES)) {
            let DeviceSpan { device, at, blocks } = *span;
            SpanRecord { device, reserved: 0, at, blocks }.encode(record);
        }
    }

    /// Decodes and checks the table of a superblock; `bytes` begin after it.
    pub(crate) fn decode(superblock: &Superblock, bytes: &[u8]) -> Result<Self, CorruptionKind> {
        if superblock.is_unsupported() || superblock.first == 0 {
            return Ok(Self::single(superblock.blocks));
        }
        let (devices, spans) = (superblock.devices as usize, superblock.spans as usize);
        if devices >= DEVICES_MAX || spans > SPANS_MAX {
            return Err(CorruptionKind::Contents);
        }
        let (records, rest) = bytes.split_at(devices * DeviceRecord::BYTES);
        let (lines, mut names) = rest.split_at(spans * SpanRecord::BYTES);
        let mut others = Vec::with_capacity(devices);
        for record in records.chunks_exact(DeviceRecord::BYTES) {
            let DeviceRecord { uuid, uri_bytes, .. } = DeviceRecord::decode(record);
            let (name, behind) =
                names.split_at_checked(uri_bytes as usize).ok_or(CorruptionKind::Contents)?;
            let uri = str::from_utf8(name).map_err(|_| CorruptionKind::Contents)?.to_owned();
            others.push(SecondaryDevice { uuid, uri });
            names = behind;
        }
        let span = |record: &[u8]| {
            let SpanRecord { device, at, blocks, .. } = SpanRecord::decode(record);
            DeviceSpan { device, at, blocks }
        };
        let spans = lines.chunks_exact(SpanRecord::BYTES).map(span).collect();
        let table = Self { first: superblock.first, spans, others };
        let is_whole = table.are_spans_in_order() && table.blocks() == superblock.blocks;
        if is_whole && table.check().is_ok() { Ok(table) } else { Err(CorruptionKind::Contents) }
    }

    /// Sets the fields of a superblock that describe the table.
    pub(crate) fn store_to_superblock(&self, superblock: &mut Superblock) {
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        superblock.blocks = self.blocks();
        superblock.first = if self.spans.is_empty() { 0 } else { self.first };
        superblock.devices = count(self.others.len());
        superblock.spans = count(self.spans.len());
        if !self.spans.is_empty() {
            superblock.incompatible |= crate::format::features::DEVICES;
        }
    }

    /// Whether this table extends `before`: all previous blocks are where they were.
    pub(crate) fn is_extension_of(&self, before: &Self) -> bool {
        let is_known = |(other, now): (&SecondaryDevice, &SecondaryDevice)| other.uuid == now.uuid;
        let keeps = before.others.len() <= self.others.len()
            && before.others.iter().zip(&self.others).all(is_known);
        let mut now = self.spans_with_start();
        let stays = before.spans_with_start().all(|(begin, span)| {
            now.next().is_some_and(|(start, now)| {
                let at = (start, now.device, now.at);
                at == (begin, span.device, span.at) && now.blocks >= span.blocks
            })
        });
        keeps && stays && self.are_spans_in_order() && self.first >= STORE_BLOCKS_MIN
    }
}

impl DeviceLabel {
    /// Encodes the label block for the start of the device.
    ///
    /// # Errors
    ///
    /// The URI of the first device or the pool's name is invalid.
    pub fn encode(&self) -> Result<Box<Block>, PoolError> {
        let refused = || PoolError::BadDevice { uri: self.first_uri.clone() };
        let mut uri = [0; URI_BYTES_MAX];
        let room = uri.get_mut(..self.first_uri.len()).filter(|_| is_valid_uri(&self.first_uri));
        room.ok_or_else(refused)?.copy_from_slice(self.first_uri.as_bytes());
        let name = encode_name(&self.name).ok_or_else(|| PoolError::BadName(self.name.clone()))?;
        let Self { uuid, number, begin, generation, .. } = *self;
        let uri_bytes = u32::try_from(self.first_uri.len()).map_err(|_| refused())?;
        let body = LabelBody { uuid, number, uri_bytes, begin, name, reserved: [0; 96], uri };
        let page = Page {
            kind: BlockKind::Label,
            generation,
            owner: 0,
            body: PageBody::Label(Box::new(body)),
        };
        Ok(page.encode(self.store, 0))
    }

    /// Decodes the label in the first block of a device, of any pool.
    ///
    /// # Errors
    ///
    /// The corruption of the block.
    pub fn decode(bytes: &Block) -> Result<Self, CorruptionKind> {
        let store = Header::decode(&bytes[..]).store;
        let page = Page::decode(bytes, store, 0).map_err(|damage| damage.flaw)?;
        let PageBody::Label(body) = page.body else { return Err(CorruptionKind::Contents) };
        let LabelBody { uuid, number, begin, name, .. } = *body;
        let first_uri = body.uri_text().unwrap_or_default().to_owned();
        let (name, generation) = (decode_name(&name), page.generation);
        Ok(Self { store, name, number, uuid, generation, begin, first_uri })
    }
}

impl LabelBody {
    /// Checks a label whose checksum is right.
    pub(crate) fn check(&self) -> Result<(), CorruptionKind> {
        let is_other = (1..DEVICES_MAX as u64).contains(&u64::from(self.number));
        let begins = (STORE_BLOCKS_MIN..BLOCKS_MAX).contains(&self.begin);
        if is_other && begins && self.uri_text().is_some() {
            Ok(())
        } else {
            Err(CorruptionKind::Contents)
        }
    }

    fn uri_text(&self) -> Option<&str> {
        let bytes = self.uri.get(..usize::try_from(self.uri_bytes).ok()?)?;
        str::from_utf8(bytes).ok().filter(|name| is_valid_uri(name))
    }
}

/// Usable block range of a pool for metadata and data: all blocks except the superblocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataArea {
    /// First block.
    pub start: u64,
    /// End.
    pub end: u64,
    /// Superblocks in between: those at the end of the first device, if others follow.
    pub slots: Range<u64>,
}

impl DataArea {
    /// Whether a block is in the area.
    pub fn contains(&self, block: &u64) -> bool {
        (self.start..self.end).contains(block) && !self.slots.contains(block)
    }

    /// Whether all `blocks` blocks from `first` on are in the area.
    pub(crate) fn contains_range(&self, first: u64, blocks: u64) -> bool {
        let end = first.saturating_add(blocks);
        let meets = first < self.slots.end && self.slots.start < end;
        first >= self.start && end <= self.end && !meets
    }
}

#[cfg(test)]
mod tests {
    use super::{DEVICES_MAX, DeviceLabel, DeviceSpan, DeviceTable, SecondaryDevice};
    use crate::error::{CorruptionKind, PoolError};
    use crate::format::{Superblock, features};
    use crate::on_disk_layout::Layout;

    fn secondary_device(uuid: u128) -> SecondaryDevice {
        SecondaryDevice { uuid, uri: format!("file:/disk/{uuid}") }
    }

    fn sample_superblock() -> Superblock {
        Superblock { version: 1, ..Superblock::decode(&[0; Superblock::BYTES]) }
    }

    /// Encodes and decodes a device table.
    fn encode_and_decode(devices: &DeviceTable) -> Result<DeviceTable, CorruptionKind> {
        let (mut superblock, mut bytes) = (sample_superblock(), [0; super::TABLE_BYTES]);
        devices.store_to_superblock(&mut superblock);
        devices.encode(&mut bytes);
        DeviceTable::decode(&superblock, &bytes)
    }

    #[test]
    fn adding_and_growing_devices_keeps_all_block_addresses() {
        let mut devices = DeviceTable::single(1000);
        devices.extend_device(0, 1000);
        devices.extend_device(0, 1200);
        assert_eq!(devices, DeviceTable::single(1200));
        assert_eq!(devices.add_device(secondary_device(7), 301), 1);
        devices.extend_device(1, 401);
        assert_eq!(devices.add_device(secondary_device(8), 101), 2);
        devices.extend_device(0, 1500);
        devices.extend_device(1, 400);
        devices.extend_device(0, 1600);
        let of = |device, at, blocks| DeviceSpan { device, at, blocks };
        let expected = [of(1, 1, 400), of(2, 1, 100), of(0, 1200, 400)];
        assert_eq!(devices.spans, expected);
        let begins: Vec<u64> = devices.spans_with_start().map(|(begin, _)| begin).collect();
        assert_eq!(begins, [0, 1200, 1600, 1700]);
        assert_eq!([0, 1, 2].map(|device| devices.device_blocks_min(device)), [1600, 401, 101]);
        assert_eq!([0, 1, 2].map(|device| devices.pool_block_count_on(device)), [1600, 400, 100]);
        assert_eq!([1, 2].map(|device| devices.first_block_of(device)), [1200, 1600]);
        assert_eq!(encode_and_decode(&devices), Ok(devices.clone()));
        assert!(
            devices.is_extension_of(&DeviceTable::single(1200))
                && devices.is_extension_of(&devices)
        );
        assert!(!DeviceTable::single(1200).is_extension_of(&devices));
        let mut foreign = devices.clone();
        foreign.others[0].uuid = 9;
        assert!(!foreign.is_extension_of(&devices));
        let one = encode_and_decode(&DeviceTable::single(1200));
        assert_eq!(one, Ok(DeviceTable::single(1200)), "and no bit is set");
    }

    #[test]
    fn invalid_device_table_is_rejected() {
        let mut good = DeviceTable::single(1000);
        good.add_device(secondary_device(1), 101);
        good.add_device(secondary_device(2), 101);
        assert!(encode_and_decode(&good).is_ok());
        let breaks: [&dyn Fn(&mut DeviceTable); 7] = [
            &|devices| devices.spans[0].at = 0,
            &|devices| devices.spans[1].device = 3,
            &|devices| devices.spans[1].blocks = 0,
            &|devices| devices.spans[1] = DeviceSpan { device: 1, at: 100, blocks: 5 },
            &|devices| devices.spans[1] = DeviceSpan { device: 0, at: 999, blocks: 5 },
            &|devices| devices.spans[1].at = u64::MAX,
            &|devices| devices.others[1].uri = "with\ncontrol".into(),
        ];
        for (index, break_it) in breaks.into_iter().enumerate() {
            let mut devices = good.clone();
            break_it(&mut devices);
            assert_eq!(encode_and_decode(&devices), Err(CorruptionKind::Contents), "{index}");
        }
        let (mut superblock, mut bytes) = (sample_superblock(), [0; super::TABLE_BYTES]);
        good.store_to_superblock(&mut superblock);
        assert_eq!(superblock.incompatible, features::DEVICES);
        good.encode(&mut bytes);
        for broken in [
            Superblock { blocks: 1199, ..superblock },
            Superblock { devices: 1, ..superblock },
            Superblock { devices: 32, ..superblock },
            Superblock { spans: 64, ..superblock },
        ] {
            assert_eq!(DeviceTable::decode(&broken, &bytes), Err(CorruptionKind::Contents));
        }
    }

    #[test]
    fn device_table_larger_than_the_superblock_is_rejected() {
        let mut devices = DeviceTable::single(1000);
        (1..DEVICES_MAX as u128).for_each(|uuid| {
            devices.add_device(secondary_device(uuid), 101);
        });
        assert_eq!(devices.check(), Ok(()));
        assert_eq!(encode_and_decode(&devices), Ok(devices.clone()));
        devices.add_device(secondary_device(99), 101);
        assert!(matches!(devices.check(), Err(PoolError::TooManyDevices { devices: 33, .. })));
        let mut devices = DeviceTable::single(1000);
        let long = |uuid| SecondaryDevice { uuid, uri: format!("file:/{}", "x".repeat(2000)) };
        devices.add_device(long(1), 101);
        assert_eq!(encode_and_decode(&devices), Ok(devices.clone()));
        devices.add_device(long(2), 101);
        assert!(matches!(devices.check(), Err(PoolError::TooManyDevices { bytes: 4124, .. })));
    }

    #[test]
    fn device_label_round_trips_and_corruption_is_detected() {
        let label = DeviceLabel {
            store: 5,
            name: "pool".into(),
            number: 3,
            uuid: 6,
            generation: 17,
            begin: 1000,
            first_uri: "file:/disk/a".into(),
        };
        let mut bytes = label.encode().unwrap();
        assert_eq!(DeviceLabel::decode(&bytes), Ok(label.clone()));
        for at in 0..bytes.len() {
            bytes[at] ^= 4;
            assert!(DeviceLabel::decode(&bytes).is_err(), "byte {at}");
            bytes[at] ^= 4;
        }
        let nameless = DeviceLabel { first_uri: String::new(), ..label.clone() };
        assert!(matches!(nameless.encode(), Err(PoolError::BadDevice { .. })));
        for broken in
            [DeviceLabel { number: 0, ..label.clone() }, DeviceLabel { begin: 5, ..label }]
        {
            assert_eq!(
                DeviceLabel::decode(&broken.encode().unwrap()),
                Err(CorruptionKind::Contents)
            );
        }
    }
}
