//! Bind records: the original state of a function, written before anything is changed.
//!
//! ```text
//!   /run/tenmil/                         0700, root's, locked during changes
//!     0000:5e:00.0.bound
//!       boot 2f1c…                       a binding ends with the boot that made it
//!       driver nvme                      original driver; - for none
//!       override -                       original driver_override; - for none
//!       no-iommu N                       original parameter value; - if unchanged
//! ```
//!
//! A binding lasts until reboot, and so does `/run`; the session's runtime directory ends with the
//! session.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use rustix::fs::{FlockOperation, flock};

use super::{BindError, PciAddress};
use crate::Errno;
use crate::kernel_files::KernelFiles;
use crate::runtime_directory::RuntimeDirectory;

/// The bind records, locked.
#[derive(Debug)]
pub(super) struct BindRecords {
    machine: KernelFiles,
    _locked: File,
}

/// Original state of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OriginalBinding {
    pub(super) driver: Option<String>,
    pub(super) driver_override: Option<String>,
    /// Original value of the no-IOMMU parameter, if it was changed.
    pub(super) no_iommu: Option<String>,
}

const DIRECTORY: &str = "run/tenmil";
const SUFFIX: &str = ".bound";
const NOTHING: &str = "-";
const BOOT: &str = "proc/sys/kernel/random/boot_id";

impl BindRecords {
    /// Opens and locks the records.
    pub(super) fn open_locked(machine: &KernelFiles) -> Result<Self, BindError> {
        let directory = RuntimeDirectory::at_path(machine.path_of(DIRECTORY))
            .map_err(|error| BindError::Records { found: error.to_string() })?;
        let shown = directory.path().display().to_string();
        let refused =
            |found: String| BindError::Records { found: format!("lock {shown}: {found}") };
        let locked = File::open(directory.path()).map_err(|error| refused(error.to_string()))?;
        flock(&locked, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
            Errno::WOULDBLOCK => BindError::Busy,
            errno => refused(errno.to_string()),
        })?;
        Ok(Self { machine: machine.clone(), _locked: locked })
    }

    /// Writes a record atomically.
    pub(super) fn write_record(
        &self,
        address: PciAddress,
        former: &OriginalBinding,
    ) -> Result<(), BindError> {
        let path = record_path(&self.machine, address);
        let draft = path.with_extension("draft");
        let text = former.record_text(&boot_id(&self.machine));
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options.open(&draft).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&draft, &path)
        });
        let shown = path.display();
        written.map_err(|error| BindError::Records { found: format!("write {shown}: {error}") })
    }

    /// Deletes the record of a function.
    pub(super) fn remove_record(&self, address: PciAddress) -> Result<(), BindError> {
        let path = record_path(&self.machine, address);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(BindError::Records { found: format!("remove {}: {error}", path.display()) })
            }
            _ => Ok(()),
        }
    }
}

/// Original state of the function at `address`; `None` if it was not bound by tenmil.
pub(super) fn original_binding(
    machine: &KernelFiles,
    address: PciAddress,
) -> Result<Option<OriginalBinding>, BindError> {
    let path = record_path(machine, address);
    let Some(text) = machine.read_trimmed(&format!("{DIRECTORY}/{address}{SUFFIX}")) else {
        return Ok(None);
    };
    match OriginalBinding::parse_record(&text, &boot_id(machine)) {
        Some(former) => Ok(former),
        None => Err(BindError::Record { address, path }),
    }
}

/// Functions recorded as bound by tenmil, by address.
pub fn functions_bound_by_tenmil(machine: &KernelFiles) -> Vec<PciAddress> {
    let names = machine.directory_entries(DIRECTORY);
    let addresses = names.iter().filter_map(|name| name.strip_suffix(SUFFIX)?.parse().ok());
    let is_of_this_boot = |address: &PciAddress| {
        original_binding(machine, *address).map_or(true, |former| former.is_some())
    };
    let mut addresses: Vec<PciAddress> = addresses.filter(is_of_this_boot).collect();
    addresses.sort_unstable();
    addresses
}

impl OriginalBinding {
    fn record_text(&self, boot: &str) -> String {
        let word = |word: &Option<String>| word.clone().unwrap_or_else(|| NOTHING.into());
        format!(
            "boot {boot}\ndriver {}\noverride {}\nno-iommu {}\n",
            word(&self.driver),
            word(&self.driver_override),
            word(&self.no_iommu),
        )
    }

    /// Parses a record strictly, since its content is written to kernel files. A record of another
    /// boot counts as absent.
    fn parse_record(text: &str, boot: &str) -> Option<Option<Self>> {
        let mut lines = text.lines();
        let mut next = |key: &str| lines.next()?.strip_prefix(key)?.strip_prefix(' ');
        let recorded = next("boot")?;
        let mut word = |key: &str| match next(key)? {
            NOTHING => Some(None),
            word if is_valid_driver_name(word) => Some(Some(word.to_owned())),
            _ => None,
        };
        let former = Self {
            driver: word("driver")?,
            driver_override: word("override")?,
            no_iommu: word("no-iommu")?,
        };
        Some((recorded == boot).then_some(former))
    }
}

/// Whether a word is a valid driver name.
pub(super) fn is_valid_driver_name(word: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    !word.is_empty() && word != NOTHING && word.bytes().all(plain)
}

fn record_path(machine: &KernelFiles, address: PciAddress) -> PathBuf {
    machine.path_of(&format!("{DIRECTORY}/{address}{SUFFIX}"))
}

fn boot_id(machine: &KernelFiles) -> String {
    machine.read_trimmed(BOOT).unwrap_or_else(|| NOTHING.into())
}

#[cfg(test)]
mod tests {
    use super::{BindRecords, OriginalBinding, functions_bound_by_tenmil, original_binding};
    use crate::kernel_files::tests::fake_kernel_files;
    use crate::pci::{BindError, PciAddress};

    fn test_address() -> PciAddress {
        "5e:00.0".parse().unwrap()
    }

    fn test_binding() -> OriginalBinding {
        OriginalBinding {
            driver: Some("nvme".into()),
            driver_override: None,
            no_iommu: Some("N".into()),
        }
    }

    #[test]
    fn record_is_valid_until_reboot() {
        let (root, machine) =
            fake_kernel_files(&[("run/x", ""), (super::BOOT, "one\n"), ("proc/x", "")]);
        let ledger = BindRecords::open_locked(&machine).unwrap();
        assert_eq!(original_binding(&machine, test_address()).unwrap(), None);
        ledger.write_record(test_address(), &test_binding()).unwrap();
        assert_eq!(original_binding(&machine, test_address()).unwrap(), Some(test_binding()));
        assert_eq!(functions_bound_by_tenmil(&machine), [test_address()]);
        std::fs::write(root.path().join(super::BOOT), "two\n").unwrap();
        assert_eq!(original_binding(&machine, test_address()).unwrap(), None);
        assert_eq!(functions_bound_by_tenmil(&machine), []);
        ledger.remove_record(test_address()).unwrap();
        ledger.remove_record(test_address()).unwrap();
        assert!(!super::record_path(&machine, test_address()).exists());
    }

    #[test]
    fn records_are_locked_by_one_process() {
        let (_root, machine) = fake_kernel_files(&[("run/x", "")]);
        let first = BindRecords::open_locked(&machine).unwrap();
        assert_eq!(BindRecords::open_locked(&machine).unwrap_err(), BindError::Busy);
        drop(first);
        BindRecords::open_locked(&machine).unwrap();
    }

    #[test]
    fn malformed_record_is_rejected() {
        let good = test_binding().record_text("one");
        assert_eq!(OriginalBinding::parse_record(&good, "one"), Some(Some(test_binding())));
        for text in [
            "",
            "boot one\n",
            "boot one\ndriver nvme\noverride -\n",
            "boot one\ndriver ../nvme\noverride -\nno-iommu -\n",
            "boot one\ndriver nvme vfio\noverride -\nno-iommu -\n",
            "boot one\noverride -\ndriver nvme\nno-iommu -\n",
        ] {
            assert_eq!(OriginalBinding::parse_record(text, "one"), None, "{text:?}");
        }
    }

    #[test]
    fn temporary_file_of_a_crash_is_ignored() {
        let (root, machine) = fake_kernel_files(&[("run/x", "")]);
        let ledger = BindRecords::open_locked(&machine).unwrap();
        std::fs::write(root.path().join("run/tenmil/0000:5e:00.0.draft"), "boot on").unwrap();
        assert_eq!(functions_bound_by_tenmil(&machine), []);
        ledger.write_record(test_address(), &test_binding()).unwrap();
        assert_eq!(original_binding(&machine, test_address()).unwrap(), Some(test_binding()));
    }
}
