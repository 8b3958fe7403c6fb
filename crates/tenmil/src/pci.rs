//! NVMe functions on the PCI bus, as the kernel shows them.

use std::path::Path;

/// A function with the class code of an NVMe controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeFunction {
    /// Where it sits: `0000:5e:00.0`.
    pub address: String,
    /// Vendor identifier.
    pub vendor: u16,
    /// Device identifier.
    pub device: u16,
    /// The kernel driver that has it, if any.
    pub driver: Option<String>,
    /// The memory node that it is near to.
    pub numa_node: Option<u32>,
}

/// Mass storage, non-volatile memory, NVM Express I/O controller (PCI Code and ID Assignment,
/// class 01h, sub-class 08h, interface 02h).
const CLASS: u32 = 0x01_08_02;

/// Where the kernel shows the functions.
pub const DEVICES: &str = "/sys/bus/pci/devices";

/// All such functions under `devices`, by address. A directory that is not there has none.
pub fn nvme_functions(devices: &Path) -> Vec<NvmeFunction> {
    let Ok(entries) = std::fs::read_dir(devices) else { return Vec::new() };
    let mut functions: Vec<NvmeFunction> =
        entries.filter_map(|entry| function_at(&entry.ok()?.path())).collect();
    functions.sort_by(|one, other| one.address.cmp(&other.address));
    functions
}

fn function_at(path: &Path) -> Option<NvmeFunction> {
    let text = |name: &str| std::fs::read_to_string(path.join(name)).ok();
    let hex = |name: &str| u32::from_str_radix(text(name)?.trim().strip_prefix("0x")?, 16).ok();
    if hex("class")? != CLASS {
        return None;
    }
    let driver = std::fs::read_link(path.join("driver")).ok();
    Some(NvmeFunction {
        address: path.file_name()?.to_string_lossy().into_owned(),
        vendor: u16::try_from(hex("vendor")?).ok()?,
        device: u16::try_from(hex("device")?).ok()?,
        driver: driver.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned())),
        // A machine of one node writes -1.
        numa_node: text("numa_node").and_then(|text| text.trim().parse().ok()),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::Path;

    use super::{NvmeFunction, nvme_functions};

    fn put(directory: &Path, name: &str, text: &str) {
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(directory.join(name));
        file.unwrap().write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn only_nvme_functions_are_found_and_in_order() {
        let root = tempfile::tempdir().unwrap();
        for (address, class, node) in [
            ("0000:5e:00.0", "0x010802\n", "1\n"),
            ("0000:00:01.0", "0x020000\n", "-1\n"),
            ("0000:03:00.0", "0x010802\n", "-1\n"),
        ] {
            let function = root.path().join(address);
            std::fs::create_dir(&function).unwrap();
            put(&function, "class", class);
            put(&function, "vendor", "0x8086\n");
            put(&function, "device", "0x0a54\n");
            put(&function, "numa_node", node);
        }
        let driver = root.path().join("0000:5e:00.0/driver");
        std::os::unix::fs::symlink("../../../../bus/pci/drivers/vfio-pci", driver).unwrap();
        let bare = NvmeFunction {
            address: "0000:03:00.0".into(),
            vendor: 0x8086,
            device: 0x0a54,
            driver: None,
            numa_node: None,
        };
        let bound = NvmeFunction {
            address: "0000:5e:00.0".into(),
            driver: Some("vfio-pci".into()),
            numa_node: Some(1),
            ..bare.clone()
        };
        assert_eq!(nvme_functions(root.path()), [bare, bound]);
        assert_eq!(nvme_functions(&root.path().join("nowhere")), []);
    }
}
