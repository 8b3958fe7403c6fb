//! Signature detection: the formats whose magic numbers are on a device.
//!
//! A pure function of the bytes at both edges; it accepts any input. The positions follow the format
//! specifications and libblkid.

mod filesystem;
mod partition_table;
mod stacked_storage;

use std::fmt;

use super::device_edges::DeviceEdges;

/// A signature found on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Format: `ext4`, `LUKS 2`.
    pub kind: &'static str,
    /// Position of the magic number, in bytes from the start of the device.
    pub offset: u64,
    /// Label.
    pub label: Option<String>,
    /// UUID, or the equivalent of the format.
    pub uuid: Option<String>,
    /// Contents: partitions.
    pub parts: Vec<String>,
}

/// Detects one format.
type ProbeFn = fn(&DeviceEdges<'_>, &mut Vec<Signature>);

const PROBES: [ProbeFn; 3] = [
    partition_table::probe_partition_tables,
    stacked_storage::probe_stacked_storage,
    filesystem::probe_filesystems,
];

const MEMBERS: [&str; 8] = [
    "LVM2 physical volume",
    "MD RAID member (1.x)",
    "MD RAID member (0.90)",
    "ZFS member",
    "Btrfs",
    "bcache",
    "DRBD 8",
    "DRBD 9",
];

/// All signatures found at the edges of a device, in order of offset.
pub fn probe_signatures(ends: &DeviceEdges<'_>) -> Vec<Signature> {
    let mut found = Vec::new();
    PROBES.iter().for_each(|probe| probe(ends, &mut found));
    found.sort_by_key(|signature| signature.offset);
    found
}

impl Signature {
    const fn new(kind: &'static str, offset: u64) -> Self {
        Self { kind, offset, label: None, uuid: None, parts: Vec::new() }
    }

    /// Whether it marks one member of a multi-device format that the kernel or its tools assemble
    /// automatically.
    pub fn is_array_member(&self) -> bool {
        MEMBERS.contains(&self.kind)
    }

    fn label(self, label: Option<String>) -> Self {
        Self { label, ..self }
    }

    fn uuid(self, uuid: Option<String>) -> Self {
        Self { uuid, ..self }
    }
}

/// Formats as `ext4 "home" 0ab4… at byte 1080`.
impl fmt::Display for Signature {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.kind)?;
        if let Some(label) = &self.label {
            write!(out, " \"{label}\"")?;
        }
        if let Some(uuid) = &self.uuid {
            write!(out, " {uuid}")?;
        }
        write!(out, " at byte {}", self.offset)?;
        if !self.parts.is_empty() {
            write!(out, " with {}", self.parts.join(" and "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
