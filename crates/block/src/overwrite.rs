//! Overwrite protection: existing data that a run did not create is described and is only overwritten
//! with an explicit option.
//!
//! ```text
//!   OpenedDevice::existing ──> OverwriteReport: signatures at both edges, holders, hardware
//!                            │
//!   --overwrite ─────────> allow ──> an error with all of that and the remedy
//! ```

mod device_edges;
mod probe;
#[cfg(test)]
mod tests;

use std::fmt;
use tenmil_base::Error;

use tenmil_linux::device_users::{DevicePath, DeviceUser, HardwareIdentity};
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::storage_file::{contains_only_zeroes, read_first_and_last_bytes};

pub use self::device_edges::{DeviceEdges, END_BYTES};
pub use self::probe::{Signature, probe_signatures};
use crate::ExistingData;

/// Report on existing data on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverwriteReport {
    /// Name of the device.
    pub name: String,
    /// Size of the device.
    pub found: String,
    /// Signatures found, or why the device could not be read.
    pub signatures: Result<Vec<Signature>, Error>,
    /// Both edges contain only zeroes.
    pub is_blank: bool,
    /// It is a file that contains only zeroes.
    pub is_zeroes: bool,
    /// Holders of the device.
    pub used_by: Vec<DeviceUser>,
    /// The hardware of the device.
    pub hardware: HardwareIdentity,
}

/// Error: the device must not be overwritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverwriteDenied {
    /// One line: the data found.
    pub text: String,
    /// How to overwrite it nevertheless.
    pub remedy: String,
}

/// Permits `doing` to overwrite the existing data if `overwrite` is set and the device is not in use.
///
/// # Errors
///
/// If there is existing data and `overwrite` is not set, or if the device is in use, regardless of
/// `overwrite`.
pub fn check_overwrite_allowed(
    doing: &str,
    existing: &[ExistingData],
    overwrite: bool,
    machine: &KernelFiles,
) -> Result<(), OverwriteDenied> {
    let mut findings: Vec<OverwriteReport> =
        existing.iter().map(|one| OverwriteReport::probe_existing_data(one, machine)).collect();
    let listed = |of: &[&OverwriteReport]| {
        of.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
    };
    let used: Vec<&OverwriteReport> =
        findings.iter().filter(|one| !one.used_by.is_empty()).collect();
    // Not even `overwrite` permits writing to a device in use.
    if !used.is_empty() {
        let used = listed(&used);
        return Err(OverwriteDenied {
            text: format!("{doing} would write to a device in use: {used}; expected it not in use"),
            remedy: "Unmount it and stop what stands on it; --overwrite does not change this."
                .into(),
        });
    }
    if !overwrite {
        // Files of zeroes may be overwritten: a run that was rejected or interrupted early leaves such
        // files.
        findings.retain(|one| !one.is_zeroes);
    }
    if overwrite || findings.is_empty() {
        return Ok(());
    }
    let found = listed(&findings.iter().collect::<Vec<_>>());
    Err(OverwriteDenied {
        text: format!(
            "{doing} would destroy what is there: {found}; expected devices that this run creates, or \
             --overwrite"
        ),
        remedy: "To write to them all the same, add --overwrite.".into(),
    })
}

impl OverwriteReport {
    /// Examines existing data: reads both edges of the device and files of the kernel. Not for the I/O
    /// path.
    pub fn probe_existing_data(existing: &ExistingData, machine: &KernelFiles) -> Self {
        let ExistingData { name, found, path } = existing.clone();
        let Some(path) = path else {
            let signatures = Err(Error::environment("it has no file to look at"));
            let (used_by, hardware) = (Vec::new(), HardwareIdentity::default());
            let (is_blank, is_zeroes) = (false, false);
            return Self { name, found, signatures, is_blank, is_zeroes, used_by, hardware };
        };
        let place = DevicePath::resolve(&path);
        let ends = read_first_and_last_bytes(&path, END_BYTES);
        let is_blank = ends
            .as_ref()
            .is_ok_and(|(head, tail, _)| head.iter().chain(tail).all(|byte| *byte == 0));
        let signatures = ends
            .map(|(head, tail, size_bytes)| {
                probe_signatures(&DeviceEdges { head: &head, tail: &tail, size_bytes })
            })
            .map_err(|error| Error::environment(format!("it cannot be read: {error}")));
        let (used_by, hardware) =
            (DeviceUser::users_of(machine, &place), HardwareIdentity::of_device(machine, &place));
        let is_zeroes = is_blank && contains_only_zeroes(&path);
        Self { name, found, signatures, is_blank, is_zeroes, used_by, hardware }
    }
}

/// Formats as `/dev/sdb (1000 bytes; GPT 0ab4… at byte 512; sdb1 is mounted at /home; model Disk, serial
/// S4EW)`.
impl fmt::Display for OverwriteReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({}", self.name, self.found)?;
        match &self.signatures {
            Err(why) => write!(out, "; {why}")?,
            Ok(none) if none.is_empty() && self.is_blank => {
                out.write_str("; nothing but zeroes at both ends")?;
            }
            Ok(none) if none.is_empty() => out.write_str("; data of no kind that is known")?,
            Ok(some) => some.iter().try_for_each(|one| write!(out, "; {one}"))?,
        }
        self.used_by.iter().try_for_each(|one| write!(out, "; {one}"))?;
        let HardwareIdentity { model, serial, wwid } = &self.hardware;
        for (word, text) in [("model", model), ("serial", serial), ("wwid", wwid)] {
            if let Some(text) = text {
                write!(out, "; {word} {text}")?;
            }
        }
        out.write_str(")")
    }
}

impl fmt::Display for OverwriteDenied {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl std::error::Error for OverwriteDenied {}
