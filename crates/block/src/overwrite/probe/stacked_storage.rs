//! Signatures of layers between disk and file system: LVM, RAID, encryption, caches, mirrors.

use super::Signature;
use crate::overwrite::device_edges::DeviceEdges;
use tenmil_volume::mirror::{COPIES_AT, MirrorSuperblock, SUPERBLOCK_BYTES, uuid_text};

type StackProbeFn = fn(&DeviceEdges<'_>) -> Option<Signature>;

pub(super) fn probe_stacked_storage(ends: &DeviceEdges<'_>, found: &mut Vec<Signature>) {
    let kinds: [StackProbeFn; 7] = [
        probe_lvm,
        probe_md_0_90,
        probe_luks,
        probe_zfs,
        probe_bcache,
        probe_drbd,
        probe_tenmil_mirror,
    ];
    found.extend(kinds.iter().filter_map(|kind| kind(ends)));
    found.extend(
        md_superblock_offsets(ends).into_iter().flatten().filter_map(|at| probe_md(ends, at)),
    );
}

/// LVM: a label in one of the first four sectors. The UUID of a physical volume is alphanumeric.
fn probe_lvm(ends: &DeviceEdges<'_>) -> Option<Signature> {
    let is_label =
        |at: &u64| ends.has_bytes_at(*at, b"LABELONE") && ends.has_bytes_at(*at + 24, b"LVM2 001");
    let at = [0, 512, 1024, 1536].into_iter().find(is_label)?;
    let header = at + u64::from(ends.le32_at(at + 20)?);
    let id = ends.text_at(header, 32).filter(|id| id.len() == 32 && id.is_ascii());
    let uuid = id.map(|id| {
        let groups = [0, 6, 10, 14, 18, 22, 26, 32];
        let groups = groups.windows(2).map(|pair| &id[pair[0]..pair[1]]);
        groups.collect::<Vec<_>>().join("-")
    });
    Some(Signature::new("LVM2 physical volume", at).uuid(uuid))
}

const MD_MAGIC: u32 = 0xa92b_4efc;

/// Positions of md superblocks of version 1: 1.1, 1.2, and 1.0, which is 8 to 12 KiB before the end.
fn md_superblock_offsets(ends: &DeviceEdges<'_>) -> [Option<u64>; 3] {
    let sectors = ends.size_bytes / 512;
    [Some(0), Some(4096), sectors.checked_sub(16).map(|last| (last & !7) * 512)]
}

fn probe_md(ends: &DeviceEdges<'_>, at: u64) -> Option<Signature> {
    let is_it = ends.le32_at(at)? == MD_MAGIC && ends.le32_at(at + 4)? == 1;
    let (uuid, name) = (ends.uuid_at(at + 16), ends.text_at(at + 32, 32));
    is_it.then(|| Signature::new("MD RAID member (1.x)", at).uuid(uuid).label(name))
}

/// md superblock of version 0.90: in the last whole 64 KiB.
fn probe_md_0_90(ends: &DeviceEdges<'_>) -> Option<Signature> {
    let at = (ends.size_bytes & !0xffff).checked_sub(0x1_0000)?;
    let word = |index: u64| ends.le32_at(at + 4 * index);
    if word(0)? != MD_MAGIC || word(1)? != 0 || word(2)? != 90 {
        return None;
    }
    let uuid = [word(5)?, word(13)?, word(14)?, word(15)?];
    let uuid = uuid.map(|part| format!("{part:08x}")).join(":");
    Some(Signature::new("MD RAID member (0.90)", at).uuid(Some(uuid)))
}

/// LUKS. Version 2 has a second header with a reversed magic number at one of several positions.
fn probe_luks(ends: &DeviceEdges<'_>) -> Option<Signature> {
    const SECOND_AT: [u64; 5] = [0x4000, 0x8000, 0x1_0000, 0x2_0000, 0x4_0000];
    let second = || SECOND_AT.into_iter().find(|at| ends.has_bytes_at(*at, b"SKUL\xba\xbe"));
    let at = if ends.has_bytes_at(0, b"LUKS\xba\xbe") { 0 } else { second()? };
    let version = u16::from_be_bytes(ends.array_at(at + 6)?);
    let (kind, label) = match version {
        1 => ("LUKS 1", None),
        _ => ("LUKS 2", ends.text_at(at + 24, 48)),
    };
    Some(Signature::new(kind, at).uuid(ends.text_at(at + 168, 40)).label(label))
}

/// ZFS: four labels of 256 KiB, two at each edge. Each has a name-value list at 16 KiB and uberblocks
/// from 128 KiB on.
fn probe_zfs(ends: &DeviceEdges<'_>) -> Option<Signature> {
    const LABEL: u64 = 256 << 10;
    const MAGIC: u64 = 0x00ba_b10c;
    let end = ends.size_bytes & !(LABEL - 1);
    let behind = [end.checked_sub(2 * LABEL), end.checked_sub(LABEL)].into_iter().flatten();
    for label in [0, LABEL].into_iter().chain(behind) {
        let uberblocks = (0..128).map(|index| label + (128 << 10) + (index << 10));
        let is_one = |at: &u64| {
            ends.le64_at(*at).is_some_and(|word| word == MAGIC || word.swap_bytes() == MAGIC)
        };
        if let Some(at) = uberblocks.into_iter().find(is_one) {
            let list = ends.bytes_at(label + (16 << 10), 112 << 10).unwrap_or_default();
            let name = zfs_nvlist_value(list, b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01")
                .and_then(zfs_nvlist_text);
            let guid = zfs_nvlist_value(list, b"\0\0\0\x09pool_guid\0\0\0\0\0\0\x08\0\0\0\x01")
                .and_then(|rest| {
                    let guid = u64::from_be_bytes(rest.first_chunk().copied()?);
                    Some(guid.to_string())
                });
            return Some(Signature::new("ZFS member", at).label(name).uuid(guid));
        }
    }
    None
}

/// The bytes that follow a name and its type in an XDR-encoded name-value list.
fn zfs_nvlist_value<'a>(list: &'a [u8], pair: &[u8]) -> Option<&'a [u8]> {
    let at = list.windows(pair.len()).position(|window| window == pair)?;
    list.get(at + pair.len()..)
}

fn zfs_nvlist_text(rest: &[u8]) -> Option<String> {
    let len = u32::from_be_bytes(rest.first_chunk().copied()?) as usize;
    let ends = DeviceEdges { head: rest.get(4..)?, tail: &[], size_bytes: 0 };
    ends.text_at(0, len.min(256))
}

fn probe_bcache(ends: &DeviceEdges<'_>) -> Option<Signature> {
    const AT: u64 = 4096;
    const MAGIC: [u8; 16] = [
        0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d,
        0x81,
    ];
    let is_it = ends.has_bytes_at(AT + 24, &MAGIC);
    is_it.then(|| {
        let (uuid, label) = (ends.uuid_at(AT + 40), ends.text_at(AT + 72, 32));
        Signature::new("bcache", AT + 24).uuid(uuid).label(label)
    })
}

/// DRBD with internal metadata: in the last 4 KiB.
fn probe_drbd(ends: &DeviceEdges<'_>) -> Option<Signature> {
    let at = ends.size_bytes.checked_sub(4096)?;
    let (kind, uuid) = match ends.be32_at(at + 60)? {
        0x8374_026b | 0x8374_026c => ("DRBD 8", at + 40),
        0x8374_026d => ("DRBD 9", at + 48),
        _ => return None,
    };
    let uuid = ends.array_at(uuid).map(|bytes| format!("{:x}", u64::from_be_bytes(bytes)));
    Some(Signature::new(kind, at + 60).uuid(uuid))
}

/// Either copy of the superblock of a tenmil mirror leg.
fn probe_tenmil_mirror(ends: &DeviceEdges<'_>) -> Option<Signature> {
    COPIES_AT.into_iter().find_map(|at| {
        let bytes: &[u8; SUPERBLOCK_BYTES] =
            ends.bytes_at(at, SUPERBLOCK_BYTES)?.try_into().ok()?;
        let superblock = MirrorSuperblock::decode(bytes).ok()?;
        let label = format!("leg {} of {}", superblock.leg, superblock.legs);
        let uuid = uuid_text(superblock.uuid);
        Some(Signature::new("tenmil mirror", at).uuid(Some(uuid)).label(Some(label)))
    })
}
