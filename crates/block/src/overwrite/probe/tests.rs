use super::{Signature, probe};
use crate::overwrite::edges::{DeviceEdges, END_BYTES};
use tenmil_volume::mirror::{COPIES_AT, MirrorGeometry, Ownership, RegionBitmap, Superblock};

/// Sparse contents of a device of a given size.
struct Disk {
    head: Vec<u8>,
    tail: Vec<u8>,
    size_bytes: u64,
}

impl Disk {
    fn new(size_bytes: u64) -> Self {
        let end = usize::try_from(size_bytes).map_or(END_BYTES, |size| size.min(END_BYTES));
        Self { head: vec![0; end], tail: vec![0; end], size_bytes }
    }

    fn put(mut self, offset: u64, bytes: &[u8]) -> Self {
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

    fn found(&self) -> Vec<Signature> {
        probe(&DeviceEdges { head: &self.head, tail: &self.tail, size_bytes: self.size_bytes })
    }

    fn said(&self) -> Vec<String> {
        self.found().iter().map(ToString::to_string).collect()
    }
}

const SIZE: u64 = 1 << 30;
const UUID: [u8; 16] = [0x11; 16];
const UUID_TEXT: &str = "11111111-1111-1111-1111-111111111111";

fn disk() -> Disk {
    Disk::new(SIZE)
}

/// UTF-16, little-endian.
fn wide(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

#[test]
fn an_empty_disk_holds_nothing() {
    assert_eq!(disk().found(), []);
    assert_eq!(Disk::new(0).found(), []);
    assert_eq!(Disk::new(100).found(), []);
}

#[test]
fn what_may_have_other_devices_is_a_member_of_something() {
    let md = 0xa92b_4efc_u32.to_le_bytes();
    let zfs = 0x00ba_b10c_u64.to_le_bytes();
    for (disk, kind, is_member) in [
        (disk().put(512, b"LABELONE").put(536, b"LVM2 001"), "LVM2 physical volume", true),
        (disk().put(4096, &md).put(4100, &[1]), "MD RAID member (1.x)", true),
        (
            disk().put(SIZE - 0x1_0000, &md).put(SIZE - 0x1_0000 + 8, &[90]),
            "MD RAID member (0.90)",
            true,
        ),
        (disk().put(128 << 10, &zfs), "ZFS member", true),
        (disk().put(65_600, b"_BHRfS_M"), "Btrfs", true),
        (
            disk().put(
                4120,
                &[
                    0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48,
                    0xba, 0x6d, 0x81,
                ],
            ),
            "bcache",
            true,
        ),
        (disk().put(SIZE - 4036, &0x8374_026b_u32.to_be_bytes()), "DRBD 8", true),
        (disk().put(SIZE - 4036, &0x8374_026d_u32.to_be_bytes()), "DRBD 9", true),
        (disk().put(0, b"XFSB"), "XFS", false),
        (disk().put(0, b"LUKS\xba\xbe\0\x01"), "LUKS 1", false),
    ] {
        let found = disk.found();
        let found: Vec<_> = found.iter().map(|one| (one.kind, one.is_member())).collect();
        assert_eq!(found, [(kind, is_member)]);
    }
}

#[test]
fn each_file_system_is_told_by_its_mark_label_and_uuid() {
    let boot = |disk: Disk| disk.put(510, &[0x55, 0xaa]);
    let ext = |compatible: u8, incompatible: u8| {
        disk()
            .put(1080, &[0x53, 0xef])
            .put(1024 + 0x5c, &[compatible])
            .put(1024 + 0x60, &[incompatible])
            .put(1024 + 0x68, &UUID)
            .put(1024 + 0x78, b"root")
    };
    for (disk, expected) in [
        (ext(0, 2), format!("ext2 \"root\" {UUID_TEXT} at byte 1080")),
        (ext(4, 2), format!("ext3 \"root\" {UUID_TEXT} at byte 1080")),
        (ext(4, 0x42), format!("ext4 \"root\" {UUID_TEXT} at byte 1080")),
        (ext(0, 8), format!("ext journal \"root\" {UUID_TEXT} at byte 1080")),
        (
            disk().put(0, b"XFSB").put(32, &UUID).put(108, b"twelve bytes"),
            format!("XFS \"twelve bytes\" {UUID_TEXT} at byte 0"),
        ),
        (
            disk().put(65_600, b"_BHRfS_M").put(65_568, &UUID).put(65_835, b"b"),
            format!("Btrfs \"b\" {UUID_TEXT} at byte 65600"),
        ),
        (
            disk()
                .put(1024, &0xf2f5_2010_u32.to_le_bytes())
                .put(1132, &UUID)
                .put(1148, &wide("flash")),
            format!("F2FS \"flash\" {UUID_TEXT} at byte 1024"),
        ),
        (
            boot(disk().put(82, b"FAT32   ").put(67, &[4, 3, 2, 1]).put(71, b"EFI        ")),
            "FAT \"EFI\" 0102-0304 at byte 82".into(),
        ),
        (
            boot(disk().put(54, b"FAT16   ").put(39, &[1, 0, 0, 0]).put(43, b"NO NAME    ")),
            "FAT 0000-0001 at byte 54".into(),
        ),
        (
            boot(disk().put(3, b"EXFAT   ").put(100, &[1, 0, 2, 0])),
            "exFAT 0002-0001 at byte 3".into(),
        ),
        (boot(disk().put(3, b"NTFS    ").put(72, &[1])), "NTFS 0000000000000001 at byte 3".into()),
        (
            disk().put(4086, b"SWAPSPACE2").put(1036, &UUID).put(1052, b"s"),
            format!("swap \"s\" {UUID_TEXT} at byte 4086"),
        ),
        (disk().put(65_526, b"SWAPSPACE2"), "swap at byte 65526".into()),
        (
            disk().put(32_769, b"CD001").put(32_808, b"DEBIAN          "),
            "ISO 9660 \"DEBIAN\" at byte 32769".into(),
        ),
        (disk().put(0, b"hsqs"), "SquashFS at byte 0".into()),
        (disk().put(0, b"QFI\xfb"), "QCOW image at byte 0".into()),
        (disk().put(0, b"KDMV"), "VMDK image at byte 0".into()),
        (disk().put(0, b"vhdxfile"), "VHDX image at byte 0".into()),
    ] {
        assert_eq!(disk.said(), [expected]);
    }
}

#[test]
fn each_layer_between_is_told_too() {
    let md = |at: u64| {
        let magic = 0xa92b_4efc_u32.to_le_bytes();
        disk().put(at, &magic).put(at + 4, &[1]).put(at + 16, &UUID).put(at + 32, b"host:0")
    };
    let md_text = |at: u64| format!("MD RAID member (1.x) \"host:0\" {UUID_TEXT} at byte {at}");
    let luks = |version: u8| {
        disk().put(0, b"LUKS\xba\xbe").put(7, &[version]).put(24, b"aes").put(168, b"1-2-3")
    };
    let name = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01\0\0\0\x04tank";
    let guid = b"\0\0\0\x09pool_guid\0\0\0\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0\x07";
    let uberblock = 0x00ba_b10c_u64.to_be_bytes();
    let last = SIZE - (256 << 10);
    for (disk, expected) in [
        (
            disk()
                .put(512, b"LABELONE")
                .put(512 + 20, &[32])
                .put(512 + 24, b"LVM2 001")
                .put(544, b"abcdefghijklmnopqrstuvwxyzABCDEF"),
            "LVM2 physical volume abcdef-ghij-klmn-opqr-stuv-wxyz-ABCDEF at byte 512".into(),
        ),
        (md(0), md_text(0)),
        (md(4096), md_text(4096)),
        (md(SIZE - 8192), md_text(SIZE - 8192)),
        (
            disk()
                .put(SIZE - 65_536, &0xa92b_4efc_u32.to_le_bytes())
                .put(SIZE - 65_536 + 8, &[90])
                .put(SIZE - 65_536 + 20, &[1]),
            format!(
                "MD RAID member (0.90) 00000001:00000000:00000000:00000000 at byte {}",
                SIZE - 65_536
            ),
        ),
        (luks(1), "LUKS 1 1-2-3 at byte 0".into()),
        (luks(2), "LUKS 2 \"aes\" 1-2-3 at byte 0".into()),
        (disk().put(0x4000, b"SKUL\xba\xbe\0\x02"), "LUKS 2 at byte 16384".into()),
        (
            disk().put(128 << 10, &uberblock).put(16 << 10, name).put(20 << 10, guid),
            "ZFS member \"tank\" 7 at byte 131072".into(),
        ),
        (
            disk().put(last + (129 << 10), &uberblock),
            format!("ZFS member at byte {}", last + (129 << 10)),
        ),
        (
            disk()
                .put(4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81")
                .put(4136, &UUID),
            format!("bcache {UUID_TEXT} at byte 4120"),
        ),
        (
            disk().put(SIZE - 4036, &0x8374_026b_u32.to_be_bytes()).put(SIZE - 4049, &[5]),
            format!("DRBD 8 5 at byte {}", SIZE - 4036),
        ),
        (
            disk().put(SIZE - 4036, &0x8374_026d_u32.to_be_bytes()).put(SIZE - 4041, &[5]),
            format!("DRBD 9 5 at byte {}", SIZE - 4036),
        ),
    ] {
        assert_eq!(disk.said(), [expected]);
    }
}

#[test]
fn a_leg_of_a_mirror_is_found_by_either_copy() {
    let geometry = MirrorGeometry::over(4096, SIZE / 4096).unwrap();
    let superblock = Superblock {
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
        owner: Ownership::NONE,
    };
    for at in COPIES_AT {
        let said = disk().put(at, &superblock.encode()).said();
        assert_eq!(said, [format!("tenmil mirror \"leg 1 of 2\" {UUID_TEXT} at byte {at}")]);
    }
    let mut bytes = superblock.encode();
    bytes[100] ^= 1;
    assert_eq!(disk().put(0, &bytes).found(), [], "a damaged one is none");
}

#[test]
fn partitions_are_named() {
    let gpt = |at: u64, block: u64, disk: Disk| {
        let entries = if at == block { 2 * block } else { at - (16 << 10) };
        disk.put(at, b"EFI PART")
            .put(
                at + 56,
                &[0x33, 0x22, 0x11, 0, 0x55, 0x44, 0x77, 0x66, 8, 9, 10, 11, 12, 13, 14, 15],
            )
            .put(at + 72, &(entries / block).to_le_bytes())
            .put(at + 80, &[128])
            .put(at + 84, &[128])
            .put(entries, &[1; 16])
            .put(entries + 56, &wide("boot"))
            .put(entries + 256, &[1; 16])
    };
    let guid = "00112233-4455-6677-0809-0a0b0c0d0e0f";
    let parts = "with partition 1 \"boot\" and partition 3";
    let protective = [0, 0, 0, 0, 0xee, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
    let with_mbr = |disk: Disk| disk.put(446, &protective).put(510, &[0x55, 0xaa]);
    assert_eq!(
        gpt(512, 512, with_mbr(disk())).said(),
        [format!("GPT {guid} at byte 512 {parts}")],
        "the protective MBR is a part of it"
    );
    assert_eq!(gpt(4096, 4096, disk()).said(), [format!("GPT {guid} at byte 4096 {parts}")]);
    let last = SIZE - 512;
    assert_eq!(
        gpt(last, 512, disk()).said(),
        [format!("GPT (backup) {guid} at byte {last} {parts}")]
    );

    let mut many = gpt(512, 512, disk());
    for index in 0..12 {
        many = many.put(1024 + 128 * index, &[1; 16]);
    }
    let said = many.said();
    assert!(said[0].ends_with("partition 8 and 4 more"), "{said:?}");

    let entry = [0x80, 0, 0, 0, 0x83, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0];
    let mbr = disk().put(462, &entry).put(510, &[0x55, 0xaa]);
    assert_eq!(mbr.said(), ["MBR at byte 510 with partition 2 of 4096 bytes, type 83h"]);
    assert_eq!(mbr.put(446, &[0x33]).found(), [], "code is no table");
    assert_eq!(disk().put(510, &[0x55, 0xaa]).found(), [], "nor is an empty one");
}

#[test]
fn what_lies_at_both_ends_is_told_in_its_order() {
    let disk = disk()
        .put(SIZE - 4036, &0x8374_026b_u32.to_be_bytes())
        .put(1080, &[0x53, 0xef])
        .put(0, b"LUKS\xba\xbe\0\x01");
    let kinds: Vec<&str> = disk.found().iter().map(|one| one.kind).collect();
    assert_eq!(kinds, ["LUKS 1", "ext2", "DRBD 8"]);
}
