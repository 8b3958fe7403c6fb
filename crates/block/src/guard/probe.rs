//! What lies on a device, told by the marks that everybody leaves who puts something there.
//!
//! A pure function of the bytes at both ends, and of nothing else: it takes whatever it is given.
//! Where the marks lie is said by the formats themselves, and by what libblkid looks for.

mod filesystem;
mod partition;
mod stack;

use std::fmt;

use super::ends::Ends;

/// A mark that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Of what: `ext4`, `LUKS 2`.
    pub kind: &'static str,
    /// Where the mark lies, in bytes from the start of the device.
    pub offset: u64,
    /// What it is called.
    pub label: Option<String>,
    /// Its UUID, or what stands for one.
    pub uuid: Option<String>,
    /// What it holds: partitions.
    pub parts: Vec<String>,
}

/// One kind of mark.
type Probe = fn(&Ends<'_>, &mut Vec<Signature>);

const PROBES: [Probe; 3] = [partition::probe, stack::probe, filesystem::probe];

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

/// Everything that is known to have left its mark at the ends of a device, in the order of where the
/// marks lie.
pub fn probe(ends: &Ends<'_>) -> Vec<Signature> {
    let mut found = Vec::new();
    PROBES.iter().for_each(|probe| probe(ends, &mut found));
    found.sort_by_key(|signature| signature.offset);
    found
}

impl Signature {
    const fn new(kind: &'static str, offset: u64) -> Self {
        Self { kind, offset, label: None, uuid: None, parts: Vec::new() }
    }

    /// Whether it marks a part of something that may have other devices, and that the kernel or its
    /// tools put together by themselves.
    pub fn is_member(&self) -> bool {
        MEMBERS.contains(&self.kind)
    }

    fn label(self, label: Option<String>) -> Self {
        Self { label, ..self }
    }

    fn uuid(self, uuid: Option<String>) -> Self {
        Self { uuid, ..self }
    }
}

/// `ext4 "home" 0ab4… at byte 1080`.
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
