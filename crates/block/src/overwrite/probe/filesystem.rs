//! Signatures of file systems, swap and disk images.

use super::Signature;
use crate::overwrite::device_edges::DeviceEdges;

/// Formats with one magic number at one offset, and a UUID and a label of fixed length.
struct SimpleSignature {
    kind: &'static str,
    magic: &'static [u8],
    at: u64,
    uuid: Option<u64>,
    label: Option<(u64, usize)>,
}

const fn simple_signature(kind: &'static str, magic: &'static [u8], at: u64) -> SimpleSignature {
    SimpleSignature { kind, magic, at, uuid: None, label: None }
}

const PLAIN: &[SimpleSignature] = &[
    SimpleSignature {
        uuid: Some(32),
        label: Some((108, 12)),
        ..simple_signature("XFS", b"XFSB", 0)
    },
    SimpleSignature {
        uuid: Some(65_568),
        label: Some((65_835, 256)),
        ..simple_signature("Btrfs", b"_BHRfS_M", 65_600)
    },
    SimpleSignature {
        uuid: Some(1072),
        label: Some((1088, 16)),
        ..simple_signature("EROFS", &[0xe2, 0xe1, 0xf5, 0xe0], 1024)
    },
    SimpleSignature { label: Some((32_808, 32)), ..simple_signature("ISO 9660", b"CD001", 32_769) },
    simple_signature("SquashFS", b"hsqs", 0),
    simple_signature("BitLocker", b"-FVE-FS-", 3),
    simple_signature("QCOW image", b"QFI\xfb", 0),
    simple_signature("VMDK image", b"KDMV", 0),
    simple_signature("VMDK image", b"# Disk DescriptorFile", 0),
    simple_signature("VHDX image", b"vhdxfile", 0),
    simple_signature("VHD image", b"conectix", 0),
    simple_signature("VDI image", &[0x7f, 0x10, 0xda, 0xbe], 64),
];

pub(super) fn probe_filesystems(ends: &DeviceEdges<'_>, found: &mut Vec<Signature>) {
    for one in PLAIN.iter().filter(|one| ends.has_bytes_at(one.at, one.magic)) {
        let uuid = one.uuid.and_then(|at| ends.uuid_at(at));
        let label = one.label.and_then(|(at, len)| ends.text_at(at, len));
        found.push(Signature::new(one.kind, one.at).uuid(uuid).label(label));
    }
    let others = [
        probe_ext(ends),
        probe_f2fs(ends),
        probe_fat(ends),
        probe_exfat(ends),
        probe_ntfs(ends),
        probe_swap(ends),
    ];
    found.extend(others.into_iter().flatten());
}

/// The superblock of ext2, ext3 and ext4, at byte 1024.
fn probe_ext(ends: &DeviceEdges<'_>) -> Option<Signature> {
    const AT: u64 = 1024;
    const HAS_JOURNAL: u32 = 0x4;
    const JOURNAL_DEVICE: u32 = 0x8;
    // Incompatible features that ext3 supports: filetype, recover, meta_bg. Read-only compatible
    // features: sparse_super, large_file, btree_dir.
    const INCOMPATIBLE_OF_EXT3: u32 = 0x2 | 0x4 | 0x10;
    const READ_ONLY_OF_EXT3: u32 = 0x1 | 0x2 | 0x4;
    if ends.le16_at(AT + 0x38)? != 0xef53 {
        return None;
    }
    let features = |offset| ends.le32_at(AT + offset);
    let (compatible, incompatible) = (features(0x5c)?, features(0x60)?);
    let read_only = features(0x64)?;
    let kind = if incompatible & JOURNAL_DEVICE != 0 {
        "ext journal"
    } else if incompatible & !INCOMPATIBLE_OF_EXT3 != 0 || read_only & !READ_ONLY_OF_EXT3 != 0 {
        "ext4"
    } else if compatible & HAS_JOURNAL != 0 {
        "ext3"
    } else {
        "ext2"
    };
    let (uuid, label) = (ends.uuid_at(AT + 0x68), ends.text_at(AT + 0x78, 16));
    Some(Signature::new(kind, AT + 0x38).uuid(uuid).label(label))
}

fn probe_f2fs(ends: &DeviceEdges<'_>) -> Option<Signature> {
    const AT: u64 = 1024;
    let (uuid, label) = (ends.uuid_at(AT + 108), ends.utf16_at(AT + 124, 1024));
    let is_it = ends.le32_at(AT)? == 0xf2f5_2010;
    is_it.then(|| Signature::new("F2FS", AT).uuid(uuid).label(label))
}

fn probe_fat(ends: &DeviceEdges<'_>) -> Option<Signature> {
    if !ends.has_bytes_at(510, &[0x55, 0xaa]) {
        return None;
    }
    let (at, serial, label) = if ends.has_bytes_at(82, b"FAT32   ") {
        (82, 67, 71)
    } else if ends.has_bytes_at(54, b"FAT12   ") || ends.has_bytes_at(54, b"FAT16   ") {
        (54, 39, 43)
    } else {
        return None;
    };
    let label = ends.text_at(label, 11).filter(|label| label != "NO NAME");
    Some(Signature::new("FAT", at).uuid(serial_of_fat(ends, serial)).label(label))
}

fn probe_exfat(ends: &DeviceEdges<'_>) -> Option<Signature> {
    let is_it = ends.has_bytes_at(3, b"EXFAT   ");
    is_it.then(|| Signature::new("exFAT", 3).uuid(serial_of_fat(ends, 100)))
}

/// A FAT volume serial number: `1A2B-3C4D`.
fn serial_of_fat(ends: &DeviceEdges<'_>, at: u64) -> Option<String> {
    let serial = ends.le32_at(at).filter(|serial| *serial != 0)?;
    Some(format!("{:04X}-{:04X}", serial >> 16, serial & 0xffff))
}

fn probe_ntfs(ends: &DeviceEdges<'_>) -> Option<Signature> {
    let is_it = ends.has_bytes_at(3, b"NTFS    ");
    is_it.then(|| {
        let serial = ends.le64_at(72).map(|serial| format!("{serial:016X}"));
        Signature::new("NTFS", 3).uuid(serial)
    })
}

/// The signature is at the end of the first page, whose size depends on the machine that created it.
fn probe_swap(ends: &DeviceEdges<'_>) -> Option<Signature> {
    const PAGES: [u64; 5] = [4096, 8192, 16_384, 32_768, 65_536];
    let marks = PAGES.map(|page| page - 10);
    let is_mark =
        |at: &u64| ends.has_bytes_at(*at, b"SWAPSPACE2") || ends.has_bytes_at(*at, b"SWAP-SPACE");
    let at = marks.into_iter().find(is_mark)?;
    let (uuid, label) = (ends.uuid_at(1036), ends.text_at(1052, 16));
    Some(Signature::new("swap", at).uuid(uuid).label(label))
}
