//! Blocks of metadata, taken apart and put together.

use std::sync::Arc;

use super::{
    BLOCK_BYTES, Block, Header, Kind, LEVEL_MAX, LabelBody, MAGIC, NUMBER_MAX, OwnerRecord,
    ParentBody, RECORDS_MAX, Record, SUPERBLOCK_MAX, Superblock, VolumeBody,
};
use crate::devices::{Devices, Room, TABLE_BYTES};
use crate::error::{Damage, Flaw};
use crate::layout::Layout;

/// A block of metadata, its header checked against where it lies and whose it is, and decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// What it is.
    pub kind: Kind,
    /// The transaction that wrote it.
    pub generation: u64,
    /// The volume that it was written for; zero if it serves all.
    pub owner: u64,
    /// What it holds.
    pub body: Body,
}

/// What a block of metadata holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// A superblock, the devices behind it, and what is known of its owner.
    Superblock(Superblock, Arc<Devices>, OwnerRecord),
    /// A volume.
    Volume(VolumeBody),
    /// What a volume is read from.
    Parent(Box<ParentBody>),
    /// What a device is.
    Label(Box<LabelBody>),
    /// A node.
    Node {
        /// Height above the leaves.
        level: u8,
        /// Its lines, by ascending keys.
        records: Vec<Record>,
    },
}

impl Page {
    /// The records of a node; none if it is none.
    pub fn records(&self) -> &[Record] {
        if let Body::Node { records, .. } = &self.body { records } else { &[] }
    }

    /// How high it is above the leaves.
    pub const fn level(&self) -> u8 {
        if let Body::Node { level, .. } = self.body { level } else { 0 }
    }

    /// Whether it is a node with more records than a block has room for: there is no such block.
    pub(crate) fn is_overfull(&self) -> bool {
        self.records().len() > RECORDS_MAX
    }

    /// Whether the blocks that its lines are about lie in the room of a store.
    pub(crate) fn stays_in(&self, room: &Room) -> bool {
        let is_leaf = self.level() == 0;
        self.records().iter().all(|record| {
            let first = match self.kind {
                Kind::Map if is_leaf && record.is_hole() => return true,
                Kind::Map if is_leaf => record.place(),
                Kind::Space if is_leaf => record.key,
                // Where a child lies is compared when it is looked for.
                _ => return true,
            };
            room.holds(first, record.extra)
        })
    }

    /// The block as it lies at `address` in the store.
    pub fn encode(&self, store: u128, address: u64) -> Box<Block> {
        let mut bytes = Box::new([0; BLOCK_BYTES]);
        let body = &mut bytes[Header::BYTES..];
        match &self.body {
            Body::Superblock(superblock, devices, owner) => {
                superblock.encode(body);
                let behind = &mut body[Superblock::BYTES..];
                devices.encode(behind);
                if let Some(at) = owner_at(devices) {
                    owner.encode(&mut behind[at..]);
                }
            }
            Body::Volume(volume) => volume.encode(body),
            Body::Parent(parent) => parent.encode(body),
            Body::Label(label) => label.encode(body),
            Body::Node { records, .. } => {
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
        let checksum = checksum(&bytes);
        Header { checksum, ..header }.encode(&mut bytes[..]);
        bytes
    }

    /// Takes a block apart that was read at `address`. Nothing in it is believed: what it says of
    /// itself must be true, and every number in it within the format's limits.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn decode(bytes: &Block, store: u128, address: u64) -> Result<Self, Damage> {
        let damage = |flaw| Damage { address, kind: None, owner: 0, flaw };
        let header = check_header(bytes, address).map_err(damage)?;
        if header.store != store {
            return Err(damage(Flaw::Store { found: header.store }));
        }
        Self::decode_body(bytes, &header).map_err(|flaw| Damage {
            address,
            kind: Kind::from_code(header.kind),
            owner: header.owner,
            flaw,
        })
    }

    fn decode_body(bytes: &Block, header: &Header) -> Result<Self, Flaw> {
        let kind = Kind::from_code(header.kind).ok_or(Flaw::Contents)?;
        let bytes = &bytes[Header::BYTES..];
        let body = match kind {
            Kind::Superblock => {
                let superblock = Superblock::decode(bytes);
                superblock.check()?;
                let devices = Devices::decode(&superblock, &bytes[Superblock::BYTES..])?;
                let behind = &bytes[Superblock::BYTES..];
                let owner = owner_at(&devices).map(|at| OwnerRecord::decode(&behind[at..]));
                let owner = owner.unwrap_or(OwnerRecord::NONE);
                Body::Superblock(superblock, Arc::new(devices), owner)
            }
            Kind::Volume => Body::Volume(VolumeBody::decode(bytes)),
            Kind::Parent => Body::Parent(Box::new(ParentBody::decode(bytes))),
            Kind::Label => Body::Label(Box::new(LabelBody::decode(bytes))),
            _ => decode_node(bytes, header, kind)?,
        };
        match &body {
            Body::Volume(volume) => volume.check()?,
            Body::Parent(parent) => parent.check()?,
            Body::Label(label) => label.check()?,
            Body::Superblock(..) | Body::Node { .. } => {}
        }
        Ok(Self { kind, generation: header.generation, owner: header.owner, body })
    }
}

/// The superblock in a block that was read at `address`, whatever the store.
///
/// # Errors
///
/// What is wrong with the block.
pub fn decode_superblock(
    bytes: &Block,
    address: u64,
) -> Result<(u128, u64, Superblock, Arc<Devices>), Flaw> {
    let header = check_header(bytes, address)?;
    if header.generation >= SUPERBLOCK_MAX {
        return Err(Flaw::Contents);
    }
    match Page::decode_body(bytes, &header)?.body {
        Body::Superblock(superblock, devices, _) => {
            Ok((header.store, header.generation, superblock, devices))
        }
        _ => Err(Flaw::Contents),
    }
}

/// What a superblock says of its owner; nothing is known if it is none.
pub fn decode_owner(bytes: &Block) -> OwnerRecord {
    let header = Header::decode(bytes);
    match Page::decode_body(bytes, &header).map(|page| page.body) {
        Ok(Body::Superblock(_, _, owner)) => owner,
        _ => OwnerRecord::NONE,
    }
}

/// Where it stands behind the superblock: at the end of the block, if the devices leave room.
fn owner_at(devices: &Devices) -> Option<usize> {
    let at = TABLE_BYTES - OwnerRecord::BYTES;
    (devices.table_bytes() <= at).then_some(at)
}

fn check_header(bytes: &Block, address: u64) -> Result<Header, Flaw> {
    let header = Header::decode(bytes);
    let expected = checksum(bytes);
    if header.magic != MAGIC {
        Err(Flaw::Magic)
    } else if header.checksum != expected {
        Err(Flaw::Checksum { found: header.checksum, expected })
    } else if header.address != address {
        Err(Flaw::Address { found: header.address })
    } else if header.generation >= NUMBER_MAX {
        Err(Flaw::Contents)
    } else {
        Ok(header)
    }
}

fn decode_node(bytes: &[u8], header: &Header, kind: Kind) -> Result<Body, Flaw> {
    let (count, level) = (usize::from(header.count), header.level);
    if count == 0 || count > RECORDS_MAX || level > LEVEL_MAX {
        return Err(Flaw::Contents);
    }
    let lines = bytes.chunks_exact(Record::BYTES);
    let records: Vec<Record> = lines.take(count).map(Record::decode).collect();
    let last = records.iter().try_fold(0, |end, record| {
        let (next, whole) = match level {
            0 => (kind.end(record)?, kind.holds(record)),
            _ => (record.key.checked_add(1)?, !record.child().is_none()),
        };
        (record.key >= end && whole).then_some(next)
    });
    last.map(|_| Body::Node { level, records }).ok_or(Flaw::Records)
}

/// Makes a block's header say whose it is and where it lies, and its checksum right.
pub(crate) fn reseal(bytes: &mut Block, store: u128, address: u64) {
    let header = Header { magic: MAGIC, store, address, ..Header::decode(&bytes[..]) };
    header.encode(&mut bytes[..]);
    let checksum = checksum(bytes);
    Header { checksum, ..header }.encode(&mut bytes[..]);
}

fn checksum(bytes: &Block) -> u32 {
    crc_fast::crc32_iscsi(&bytes[size_of::<u32>()..])
}
