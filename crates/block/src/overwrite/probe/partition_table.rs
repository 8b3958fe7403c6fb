//! Partition tables: GPT (UEFI 2.10, section 5.3) and MBR.

use super::Signature;
use crate::overwrite::device_edges::DeviceEdges;

/// Maximum number of partitions listed by name; beyond it, only their count is given.
const NAMED_MAX: usize = 8;
/// Maximum number of entries read.
const ENTRIES_MAX: u32 = 256;
const BLOCK_SIZES: [u64; 2] = [512, 4096];

pub(super) fn probe_partition_tables(ends: &DeviceEdges<'_>, found: &mut Vec<Signature>) {
    let before = found.len();
    for block in BLOCK_SIZES {
        probe_gpt(ends, block, block, found);
        if let Some(last) = ends.size_bytes.checked_sub(block).filter(|last| *last > block) {
            probe_gpt(ends, last, block, found);
        }
    }
    if found.len() == before {
        probe_mbr(ends, found);
    }
}

/// GPT header, at byte offsets, and a partition entry:
///
/// ```text
///   0          8     56          72        80      84          entry: 0      16     32     40    56
///   | EFI PART | …   | disk GUID | entries | count | size |           | type | GUID | from | to | name
/// ```
fn probe_gpt(ends: &DeviceEdges<'_>, at: u64, block: u64, found: &mut Vec<Signature>) {
    if !ends.has_bytes_at(at, b"EFI PART") {
        return;
    }
    let kind = if at == block { "GPT" } else { "GPT (backup)" };
    let mut signature = Signature::new(kind, at).uuid(ends.guid_at(at + 56));
    let parts = gpt_partition_labels(ends, at, block).unwrap_or_default();
    let count = parts.len();
    signature.parts = parts.into_iter().take(NAMED_MAX).collect();
    if count > NAMED_MAX {
        signature.parts.push(format!("{} more", count - NAMED_MAX));
    }
    found.push(signature);
}

fn gpt_partition_labels(ends: &DeviceEdges<'_>, at: u64, block: u64) -> Option<Vec<String>> {
    let first = ends.le64_at(at + 72)?.checked_mul(block)?;
    let (count, size) =
        (ends.le32_at(at + 80)?.min(ENTRIES_MAX), u64::from(ends.le32_at(at + 84)?));
    let mut parts = Vec::new();
    for index in 0..count {
        let Some(entry) = first.checked_add(size.checked_mul(u64::from(index))?) else { break };
        let Some(kind) = ends.array_at::<16>(entry) else { break };
        if kind == [0; 16] {
            continue;
        }
        let name = ends.utf16_at(entry + 56, 72);
        let name = name.map_or_else(String::new, |name| format!(" \"{name}\""));
        parts.push(format!("partition {}{name}", index + 1));
    }
    Some(parts)
}

/// ```text
///   446: four times  | state | … | type (4) | … | first (8) | sectors (12) |     510: 55 aa
/// ```
///
/// A boot sector of a file system ends in the same two bytes, but has code and text where a table has
/// partition states.
fn probe_mbr(ends: &DeviceEdges<'_>, found: &mut Vec<Signature>) {
    if !ends.has_bytes_at(510, &[0x55, 0xaa]) || is_filesystem_boot_sector(ends) {
        return;
    }
    let mut parts = Vec::new();
    for index in 0..4_u32 {
        let Some(entry) = ends.array_at::<16>(446 + 16 * u64::from(index)) else { return };
        let sectors = u32::from_le_bytes([entry[12], entry[13], entry[14], entry[15]]);
        if entry[0] & 0x7f != 0 {
            return;
        }
        if entry[4] != 0 && sectors != 0 {
            let bytes = u64::from(sectors) * 512;
            parts.push(format!("partition {} of {bytes} bytes, type {:02x}h", index + 1, entry[4]));
        }
    }
    if !parts.is_empty() {
        found.push(Signature { parts, ..Signature::new("MBR", 510) });
    }
}

fn is_filesystem_boot_sector(ends: &DeviceEdges<'_>) -> bool {
    let names: [(u64, &[u8]); 5] =
        [(54, b"FAT1"), (82, b"FAT32"), (3, b"EXFAT"), (3, b"NTFS"), (3, b"-FVE-FS-")];
    names.iter().any(|(offset, name)| ends.has_bytes_at(*offset, name))
}
