use super::{Signature, probe_signatures};
use crate::overwrite::device_edges::{DeviceEdges, END_BYTES};
use tenmil_volume::mirror::{
    COPIES_AT, MirrorGeometry, MirrorOwnership, MirrorSuperblock, RegionBitmap,
};

/// Sparse contents of a device of a given size.
struct DiskImage {
    head: Vec<u8>,
    tail: Vec<u8>,
    size_bytes: u64,
}

impl DiskImage {
    fn new(size_bytes: u64) -> Self {
        let end = usize::try_from(size_bytes).map_or(END_BYTES, |size| size.min(END_BYTES));
        Self { head: vec![0; end], tail: vec![0; end], size_bytes }
    }

    fn write_at(mut self, offset: u64, bytes: &[u8]) -> Self {
        let before_tail = self.size_bytes - self.tail.len() as u64;
        for (index, byte) in (offset..).zip(bytes) {
            if let Ok(index) = usize::try_from(index)
                && index < self.head.len()
            {
                self.head[index] = *byte;
            }
            if let Some(index) = index.checked_sub(before_tail) {
                self.tail[usize::try_from(index).unwrap()] = *byte;
            }
        }
        self
    }

    fn probe(&self) -> Vec<Signature> {
        probe_signatures(&DeviceEdges {
            head: &self.head,
            tail: &self.tail,
            size_bytes: self.size_bytes,
        })
    }

    fn probe_as_text(&self) -> Vec<String> {
        self.probe().iter().map(ToString::to_string).collect()
    }
}

const SIZE: u64 = 1 << 30;
const UUID: [u8; 16] = [0x11; 16];
const UUID_TEXT: &str = "11111111-1111-1111-1111-111111111111";

fn empty_disk() -> DiskImage {
    DiskImage::new(SIZE)
}

/// UTF-16, little-endian.
fn utf16_bytes(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

#[test]
fn empty_disk_has_no_signature() {
    assert_eq!(empty_disk().probe(), []);
    assert_eq!(DiskImage::new(0).probe(), []);
    assert_eq!(DiskImage::new(100).probe(), []);
}

#[test]
fn multi_device_signatures_are_members() {
    let md = 0xa92b_4efc_u32.to_le_bytes();
    let zfs = 0x00ba_b10c_u64.to_le_bytes();
    for (disk, kind, is_member) in [
        (
            empty_disk().write_at(512, b"LABELONE").write_at(536, b"LVM2 001"),
            "LVM2 physical volume",
            true,
        ),
        (empty_disk().write_at(4096, &md).write_at(4100, &[1]), "MD RAID member (1.x)", true),
        (
            empty_disk().write_at(SIZE - 0x1_0000, &md).write_at(SIZE - 0x1_0000 + 8, &[90]),
            "MD RAID member (0.90)",
            true,
        ),
        (empty_disk().write_at(128 << 10, &zfs), "ZFS member", true),
        (empty_disk().write_at(65_600, b"_BHRfS_M"), "Btrfs", true),
        (
            empty_disk().write_at(
                4120,
                &[
                    0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48,
                    0xba, 0x6d, 0x81,
                ],
            ),
            "bcache",
            true,
        ),
        (empty_disk().write_at(SIZE - 4036, &0x8374_026b_u32.to_be_bytes()), "DRBD 8", true),
        (empty_disk().write_at(SIZE - 4036, &0x8374_026d_u32.to_be_bytes()), "DRBD 9", true),
        (empty_disk().write_at(0, b"XFSB"), "XFS", false),
        (empty_disk().write_at(0, b"LUKS\xba\xbe\0\x01"), "LUKS 1", false),
    ] {
        let found = disk.probe();
        let found: Vec<_> = found.iter().map(|one| (one.kind, one.is_array_member())).collect();
        assert_eq!(found, [(kind, is_member)]);
    }
}

#[test]
fn file_systems_are_detected_with_label_and_uuid() {
    let boot = |disk: DiskImage| disk.write_at(510, &[0x55, 0xaa]);
    let ext = |compatible: u8, incompatible: u8| {
        empty_disk()
            .write_at(1080, &[0x53, 0xef])
            .write_at(1024 + 0x5c, &[compatible])
            .write_at(1024 + 0x60, &[incompatible])
            .write_at(1024 + 0x68, &UUID)
            .write_at(1024 + 0x78, b"root")
    };
    for (disk, expected) in [
        (ext(0, 2), format!("ext2 \"root\" {UUID_TEXT} at byte 1080")),
        (ext(4, 2), format!("ext3 \"root\" {UUID_TEXT} at byte 1080")),
        (ext(4, 0x42), format!("ext4 \"root\" {UUID_TEXT} at byte 1080")),
        (ext(0, 8), format!("ext journal \"root\" {UUID_TEXT} at byte 1080")),
        (
            empty_disk().write_at(0, b"XFSB").write_at(32, &UUID).write_at(108, b"twelve bytes"),
            format!("XFS \"twelve bytes\" {UUID_TEXT} at byte 0"),
        ),
        (
            empty_disk()
                .write_at(65_600, b"_BHRfS_M")
                .write_at(65_568, &UUID)
                .write_at(65_835, b"b"),
            format!("Btrfs \"b\" {UUID_TEXT} at byte 65600"),
        ),
        (
            empty_disk()
                .write_at(1024, &0xf2f5_2010_u32.to_le_bytes())
                .write_at(1132, &UUID)
                .write_at(1148, &utf16_bytes("flash")),
            format!("F2FS \"flash\" {UUID_TEXT} at byte 1024"),
        ),
        (
            boot(
                empty_disk()
                    .write_at(82, b"FAT32   ")
                    .write_at(67, &[4, 3, 2, 1])
                    .write_at(71, b"EFI        "),
            ),
            "FAT \"EFI\" 0102-0304 at byte 82".into(),
        ),
        (
            boot(
                empty_disk()
                    .write_at(54, b"FAT16   ")
                    .write_at(39, &[1, 0, 0, 0])
                    .write_at(43, b"NO NAME    "),
            ),
            "FAT 0000-0001 at byte 54".into(),
        ),
        (
            boot(empty_disk().write_at(3, b"EXFAT   ").write_at(100, &[1, 0, 2, 0])),
            "exFAT 0002-0001 at byte 3".into(),
        ),
        (
            boot(empty_disk().write_at(3, b"NTFS    ").write_at(72, &[1])),
            "NTFS 0000000000000001 at byte 3".into(),
        ),
        (
            empty_disk().write_at(4086, b"SWAPSPACE2").write_at(1036, &UUID).write_at(1052, b"s"),
            format!("swap \"s\" {UUID_TEXT} at byte 4086"),
        ),
        (empty_disk().write_at(65_526, b"SWAPSPACE2"), "swap at byte 65526".into()),
        (
            empty_disk().write_at(32_769, b"CD001").write_at(32_808, b"DEBIAN          "),
            "ISO 9660 \"DEBIAN\" at byte 32769".into(),
        ),
        (empty_disk().write_at(0, b"hsqs"), "SquashFS at byte 0".into()),
        (empty_disk().write_at(0, b"QFI\xfb"), "QCOW image at byte 0".into()),
        (empty_disk().write_at(0, b"KDMV"), "VMDK image at byte 0".into()),
        (empty_disk().write_at(0, b"vhdxfile"), "VHDX image at byte 0".into()),
    ] {
        assert_eq!(disk.probe_as_text(), [expected]);
    }
}

#[test]
fn storage_layers_are_detected() {
    let md = |at: u64| {
        let magic = 0xa92b_4efc_u32.to_le_bytes();
        empty_disk()
            .write_at(at, &magic)
            .write_at(at + 4, &[1])
            .write_at(at + 16, &UUID)
            .write_at(at + 32, b"host:0")
    };
    let md_text = |at: u64| format!("MD RAID member (1.x) \"host:0\" {UUID_TEXT} at byte {at}");
    let luks = |version: u8| {
        empty_disk()
            .write_at(0, b"LUKS\xba\xbe")
            .write_at(7, &[version])
            .write_at(24, b"aes")
            .write_at(168, b"1-2-3")
    };
    let name = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01\0\0\0\x04tank";
    let guid = b"\0\0\0\x09pool_guid\0\0\0\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0\x07";
    let uberblock = 0x00ba_b10c_u64.to_be_bytes();
    let last = SIZE - (256 << 10);
    for (disk, expected) in [
        (
            empty_disk()
                .write_at(512, b"LABELONE")
                .write_at(512 + 20, &[32])
                .write_at(512 + 24, b"LVM2 001")
                .write_at(544, b"abcdefghijklmnopqrstuvwxyzABCDEF"),
            "LVM2 physical volume abcdef-ghij-klmn-opqr-stuv-wxyz-ABCDEF at byte 512".into(),
        ),
        (md(0), md_text(0)),
        (md(4096), md_text(4096)),
        (md(SIZE - 8192), md_text(SIZE - 8192)),
        (
            empty_disk()
                .write_at(SIZE - 65_536, &0xa92b_4efc_u32.to_le_bytes())
                .write_at(SIZE - 65_536 + 8, &[90])
                .write_at(SIZE - 65_536 + 20, &[1]),
            format!(
                "MD RAID member (0.90) 00000001:00000000:00000000:00000000 at byte {}",
                SIZE - 65_536
            ),
        ),
        (luks(1), "LUKS 1 1-2-3 at byte 0".into()),
        (luks(2), "LUKS 2 \"aes\" 1-2-3 at byte 0".into()),
        (empty_disk().write_at(0x4000, b"SKUL\xba\xbe\0\x02"), "LUKS 2 at byte 16384".into()),
        (
            empty_disk()
                .write_at(128 << 10, &uberblock)
                .write_at(16 << 10, name)
                .write_at(20 << 10, guid),
            "ZFS member \"tank\" 7 at byte 131072".into(),
        ),
        (
            empty_disk().write_at(last + (129 << 10), &uberblock),
            format!("ZFS member at byte {}", last + (129 << 10)),
        ),
        (
            empty_disk()
                .write_at(4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81")
                .write_at(4136, &UUID),
            format!("bcache {UUID_TEXT} at byte 4120"),
        ),
        (
            empty_disk()
                .write_at(SIZE - 4036, &0x8374_026b_u32.to_be_bytes())
                .write_at(SIZE - 4049, &[5]),
            format!("DRBD 8 5 at byte {}", SIZE - 4036),
        ),
        (
            empty_disk()
                .write_at(SIZE - 4036, &0x8374_026d_u32.to_be_bytes())
                .write_at(SIZE - 4041, &[5]),
            format!("DRBD 9 5 at byte {}", SIZE - 4036),
        ),
    ] {
        assert_eq!(disk.probe_as_text(), [expected]);
    }
}

#[test]
fn mirror_leg_is_detected_by_either_superblock_copy() {
    let geometry = MirrorGeometry::for_legs(4096, SIZE / 4096).unwrap();
    let superblock = MirrorSuperblock {
        uuid: u128::from_be_bytes(UUID),
        sequence: 1,
        generation: 1,
        leg: 1,
        legs: 2,
        geometry,
        in_sync: 3,
        gone: 0,
        fresh: 0,
        known: [1; 8],
        dirty: RegionBitmap::new(geometry.regions()),
        owner: MirrorOwnership::NONE,
    };
    for at in COPIES_AT {
        let said = empty_disk().write_at(at, &superblock.encode()).probe_as_text();
        assert_eq!(said, [format!("tenmil mirror \"leg 1 of 2\" {UUID_TEXT} at byte {at}")]);
    }
    let mut bytes = superblock.encode();
    bytes[100] ^= 1;
    assert_eq!(empty_disk().write_at(0, &bytes).probe(), [], "a damaged one is none");
}

#[test]
fn partition_tables_are_detected() {
    let gpt = |at: u64, block: u64, disk: DiskImage| {
        let entries = if at == block { 2 * block } else { at - (16 << 10) };
        disk.write_at(at, b"EFI PART")
            .write_at(
                at + 56,
                &[0x33, 0x22, 0x11, 0, 0x55, 0x44, 0x77, 0x66, 8, 9, 10, 11, 12, 13, 14, 15],
            )
            .write_at(at + 72, &(entries / block).to_le_bytes())
            .write_at(at + 80, &[128])
            .write_at(at + 84, &[128])
            .write_at(entries, &[1; 16])
            .write_at(entries + 56, &utf16_bytes("boot"))
            .write_at(entries + 256, &[1; 16])
    };
    let guid = "00112233-4455-6677-0809-0a0b0c0d0e0f";
    let parts = "with partition 1 \"boot\" and partition 3";
    let protective = [0, 0, 0, 0, 0xee, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
    let with_mbr = |disk: DiskImage| disk.write_at(446, &protective).write_at(510, &[0x55, 0xaa]);
    assert_eq!(
        gpt(512, 512, with_mbr(empty_disk())).probe_as_text(),
        [format!("GPT {guid} at byte 512 {parts}")],
        "the protective MBR is a part of it"
    );
    assert_eq!(
        gpt(4096, 4096, empty_disk()).probe_as_text(),
        [format!("GPT {guid} at byte 4096 {parts}")]
    );
    let last = SIZE - 512;
    assert_eq!(
        gpt(last, 512, empty_disk()).probe_as_text(),
        [format!("GPT (backup) {guid} at byte {last} {parts}")]
    );

    let mut many = gpt(512, 512, empty_disk());
    for index in 0..12 {
        many = many.write_at(1024 + 128 * index, &[1; 16]);
    }
    let said = many.probe_as_text();
    assert!(said[0].ends_with("partition 8 and 4 more"), "{said:?}");

    let entry = [0x80, 0, 0, 0, 0x83, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0];
    let mbr = empty_disk().write_at(462, &entry).write_at(510, &[0x55, 0xaa]);
    assert_eq!(mbr.probe_as_text(), ["MBR at byte 510 with partition 2 of 4096 bytes, type 83h"]);
    assert_eq!(mbr.write_at(446, &[0x33]).probe(), [], "code is no table");
    assert_eq!(empty_disk().write_at(510, &[0x55, 0xaa]).probe(), [], "nor is an empty one");
}

#[test]
fn signatures_at_both_ends_are_listed_in_order() {
    let disk = empty_disk()
        .write_at(SIZE - 4036, &0x8374_026b_u32.to_be_bytes())
        .write_at(1080, &[0x53, 0xef])
        .write_at(0, b"LUKS\xba\xbe\0\x01");
    let kinds: Vec<&str> = disk.probe().iter().map(|one| one.kind).collect();
    assert_eq!(kinds, ["LUKS 1", "ext2", "DRBD 8"]);
}
