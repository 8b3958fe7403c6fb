//! Encoding and decoding of metadata blocks.

use std::sync::Arc;

use super::{
    BLOCK_BYTES, Block, BlockKind, Header, LEVEL_MAX, LabelBody, MAGIC, NUMBER_MAX, OwnerRecord,
    ParentBody, RECORDS_MAX, Record, SUPERBLOCK_MAX, Superblock, VolumeBody,
};
use crate::device_table::{DataArea, DeviceTable, TABLE_BYTES};
use crate::error::{Corruption, CorruptionKind};
use crate::on_disk_layout::Layout;

/// Decoded metadata block, whose header has been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Kind.
    pub kind: BlockKind,
    /// Generation of the transaction that wrote it.
    pub generation: u64,
    /// Volume for which it was written; zero if it belongs to the pool.
    pub owner: u64,
    /// Contents.
    pub body: PageBody,
}

/// Contents of a metadata block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageBody {
    /// Superblock, with the device table and the owner record.
    Superblock(Superblock, Arc<DeviceTable>, OwnerRecord),
    /// Volume.
    Volume(VolumeBody),
    /// Parent of a volume.
    Parent(Box<ParentBody>),
    /// Device label.
    Label(Box<LabelBody>),
    /// Tree node.
    Node {
        /// Height above the leaves.
        level: u8,
        /// Records, by ascending keys.
        records: Vec<Record>,
    },
}

impl PageBody {
    /// Records of a node; `None` for anything else.
    pub(crate) fn records_mut(&mut self) -> Option<&mut Vec<Record>> {
        match self {
            Self::Node { records, .. } => Some(records),
            Self::Superblock(..) | Self::Volume(_) | Self::Parent(_) | Self::Label(_) => None,
        }
    }
}

impl Page {
    /// Records of a node; empty for other kinds.
    pub fn records(&self) -> &[Record] {
        if let PageBody::Node { records, .. } = &self.body { records } else { &[] }
    }

    /// Height above the leaves.
    pub const fn level(&self) -> u8 {
        if let PageBody::Node { level, .. } = self.body { level } else { 0 }
    }

    /// Whether it is a node with more records than fit in a block, which cannot be written.
    pub(crate) fn is_overfull(&self) -> bool {
        self.records().len() > RECORDS_MAX
    }

    /// Whether the blocks in its records are within the data area of a pool.
    pub(crate) fn are_records_within(&self, room: &DataArea) -> bool {
        let is_leaf = self.level() == 0;
        self.records().iter().all(|record| {
            let first = match self.kind {
                BlockKind::Map if is_leaf && record.is_hole() => return true,
                BlockKind::Map if is_leaf => record.first_address(),
                BlockKind::SpaceMap if is_leaf => record.key,
                // The address of a child is checked when the child is read.
                _ => return true,
            };
            room.contains_range(first, record.extra)
        })
    }

    /// Encodes the block for `address` of the pool.
    pub fn encode(&self, store: u128, address: u64) -> Box<Block> {
        let mut bytes = Box::new([0; BLOCK_BYTES]);
        let body = &mut bytes[Header::BYTES..];
        match &self.body {
            PageBody::Superblock(superblock, devices, owner) => {
                superblock.encode(body);
                let behind = &mut body[Superblock::BYTES..];
                devices.encode(behind);
                if let Some(at) = owner_record_offset(devices) {
                    owner.encode(&mut behind[at..]);
                }
            }
            PageBody::Volume(volume) => volume.encode(body),
            PageBody::Parent(parent) => parent.encode(body),
            PageBody::Label(label) => label.encode(body),
            PageBody::Node { records, .. } => {
                let lines = body.chunks_exact_mut(Record::BYTES);
                records.iter().zip(lines).for_each(|(record, line)| record.encode(line));
            }
        }
        let header = Header {
            checksum: 0,
            kind: self.kind.code(),
            level: self.level(),
            count: u16::try_from(self.records().len()).unwrap_or(u16::MAX),
            magic: MAGIC,
            store,
            address,
            generation: self.generation,
            owner: self.owner,
            reserved: 0,
        };
        header.encode(&mut bytes[..]);
        let checksum = page_checksum(&bytes);
        Header { checksum, ..header }.encode(&mut bytes[..]);
        bytes
    }

    /// Decodes a block that was read from `address`. Everything is checked: the header must match, and
    /// every number must be within the limits of the format.
    ///
    /// # Errors
    ///
    /// Kind of the corruption.
    pub fn decode(bytes: &Block, store: u128, address: u64) -> Result<Self, Corruption> {
        let damage = |flaw| Corruption { address, kind: None, owner: 0, flaw };
        let header = check_header(bytes, address).map_err(damage)?;
        if header.store != store {
            return Err(damage(CorruptionKind::Store { found: header.store }));
        }
        Self::decode_body(bytes, &header).map_err(|flaw| Corruption {
            address,
            kind: BlockKind::from_code(header.kind),
            owner: header.owner,
            flaw,
        })
    }

    fn decode_body(bytes: &Block, header: &Header) -> Result<Self, CorruptionKind> {
        let kind = BlockKind::from_code(header.kind).ok_or(CorruptionKind::Contents)?;
        let bytes = &bytes[Header::BYTES..];
        let body = match kind {
            BlockKind::Superblock => {
                let superblock = Superblock::decode(bytes);
                superblock.check()?;
                let devices = DeviceTable::decode(&superblock, &bytes[Superblock::BYTES..])?;
                let behind = &bytes[Superblock::BYTES..];
                let owner =
                    owner_record_offset(&devices).map(|at| OwnerRecord::decode(&behind[at..]));
                let owner = owner.unwrap_or(OwnerRecord::NONE);
                PageBody::Superblock(superblock, Arc::new(devices), owner)
            }
            BlockKind::Volume => PageBody::Volume(VolumeBody::decode(bytes)),
            BlockKind::Parent => PageBody::Parent(Box::new(ParentBody::decode(bytes))),
            BlockKind::Label => PageBody::Label(Box::new(LabelBody::decode(bytes))),
            _ => decode_node(bytes, header, kind)?,
        };
        match &body {
            PageBody::Volume(volume) => volume.validate()?,
            PageBody::Parent(parent) => parent.check()?,
            PageBody::Label(label) => label.check()?,
            PageBody::Superblock(..) | PageBody::Node { .. } => {}
        }
        Ok(Self { kind, generation: header.generation, owner: header.owner, body })
    }
}

/// Decodes the superblock in a block that was read from `address`, of any pool.
///
/// # Errors
///
/// The corruption of the block.
pub fn decode_superblock(
    bytes: &Block,
    address: u64,
) -> Result<(u128, u64, Superblock, Arc<DeviceTable>), CorruptionKind> {
    let header = check_header(bytes, address)?;
    if header.generation >= SUPERBLOCK_MAX {
        return Err(CorruptionKind::Contents);
    }
    match Page::decode_body(bytes, &header)?.body {
        PageBody::Superblock(superblock, devices, _) => {
            Ok((header.store, header.generation, superblock, devices))
        }
        _ => Err(CorruptionKind::Contents),
    }
}

/// Owner record of a superblock; empty if the block is not a superblock.
pub fn decode_owner(bytes: &Block) -> OwnerRecord {
    let header = Header::decode(bytes);
    match Page::decode_body(bytes, &header).map(|page| page.body) {
        Ok(PageBody::Superblock(_, _, owner)) => owner,
        _ => OwnerRecord::NONE,
    }
}

/// Offset of the owner record after the superblock: at the end of the block, if the device table leaves
/// space.
fn owner_record_offset(devices: &DeviceTable) -> Option<usize> {
    let at = TABLE_BYTES - OwnerRecord::BYTES;
    (devices.table_bytes() <= at).then_some(at)
}

fn check_header(bytes: &Block, address: u64) -> Result<Header, CorruptionKind> {
    let header = Header::decode(bytes);
    let expected = page_checksum(bytes);
    if header.magic != MAGIC {
        Err(CorruptionKind::Magic)
    } else if header.checksum != expected {
        Err(CorruptionKind::Checksum { found: header.checksum, expected })
    } else if header.address != address {
        Err(CorruptionKind::Address { found: header.address })
    } else if header.generation >= NUMBER_MAX {
        Err(CorruptionKind::Contents)
    } else {
        Ok(header)
    }
}

fn decode_node(bytes: &[u8], header: &Header, kind: BlockKind) -> Result<PageBody, CorruptionKind> {
    let (count, level) = (usize::from(header.count), header.level);
    if count == 0 || count > RECORDS_MAX || level > LEVEL_MAX {
        return Err(CorruptionKind::Contents);
    }
    let lines = bytes.chunks_exact(Record::BYTES);
    let records: Vec<Record> = lines.take(count).map(Record::decode).collect();
    let last = records.iter().try_fold(0, |end, record| {
        let (next, whole) = match level {
            0 => (kind.record_end_key(record)?, kind.is_within_limits(record)),
            _ => (record.key.checked_add(1)?, !record.child().is_null()),
        };
        (record.key >= end && whole).then_some(next)
    });
    last.map(|_| PageBody::Node { level, records }).ok_or(CorruptionKind::Records)
}

/// Sets pool, address and checksum in a block's header.
pub(crate) fn update_checksum(bytes: &mut Block, store: u128, address: u64) {
    let header = Header { magic: MAGIC, store, address, ..Header::decode(&bytes[..]) };
    header.encode(&mut bytes[..]);
    let checksum = page_checksum(bytes);
    Header { checksum, ..header }.encode(&mut bytes[..]);
}

fn page_checksum(bytes: &Block) -> u32 {
    tenmil_crc::crc32c(&bytes[size_of::<u32>()..])
}
