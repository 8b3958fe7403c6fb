//! A pool on a device that several URIs name.

use std::sync::Arc;

use tenmil_base::{BlockDevice, IoChannel, Limits};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use crate::pool::{OpenPool, VolumeRef, create_pool};
use crate::ram::RamDevice;
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// One namespace under all names.
struct NamespaceWithIdentity(Arc<RamDevice>);

impl BlockDevice for NamespaceWithIdentity {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        self.0.channel()
    }

    fn identity(&self) -> Option<String> {
        Some("uuid.1".into())
    }
}

#[test]
fn pool_is_opened_once_for_all_uris_of_its_namespace() {
    let regions = RegionTable::new(200);
    let ram = Arc::new(RamDevice::new(&regions, 512, 8 * 2048).unwrap());
    let open = |_: &Opener<'_>, _: &Uri| -> Result<OpenedDevice, Error> {
        Ok(OpenedDevice::without_existing_data(
            Arc::new(NamespaceWithIdentity(Arc::clone(&ram))),
            "a namespace",
        ))
    };
    let kinds = &crate::tests::device_types_with(&[("path", &open)]);
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, kinds };
    let [one, two] = ["path:one", "path:two"].map(|uri| uri.parse::<Uri>().unwrap());
    create_pool(&opener, &one, "tests", false).unwrap();
    let first = OpenPool::open(&opener, &VolumeRef::pool_on(&one)).unwrap();
    let second = OpenPool::open(&opener, &VolumeRef::pool_on(&two)).unwrap();
    assert!(Arc::ptr_eq(&first, &second), "two owners in one process");
    drop((first, second));
    let again = OpenPool::open(&opener, &VolumeRef::pool_on(&two)).unwrap();
    again.claim_ownership().unwrap();
    let striped = "stripe:[path:one],[path:two]".parse().unwrap();
    let mirrored = ["path:one".parse().unwrap(), "path:two".parse().unwrap()];
    let refused = crate::mirror::create_mirror(&opener, &mirrored, true).unwrap_err().to_string();
    assert!(refused.contains("path:one and path:two are one device"), "{refused}");
    let opened = opener.open(&striped).unwrap();
    assert_eq!(opened.identities.len(), 2);
}

#[test]
fn messages_name_a_pool_in_a_file_by_its_path() {
    let (regions, directory) = (RegionTable::new(200), tempfile::tempdir().unwrap());
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, kinds: crate::KINDS };
    let path = directory.path().join("pool").display().to_string();
    let device: Uri = format!("file:{path}?size=8m").parse().unwrap();
    create_pool(&opener, &device, "tests", false).unwrap();
    let short: Uri = path.parse().unwrap();
    let open = OpenPool::open(&opener, &VolumeRef::pool_on(&short)).unwrap();
    let missing = open.find_volume("db").unwrap_err().to_string();
    assert!(missing.starts_with(&format!("{path}: ")), "{missing}");
    assert_eq!(open.device_uri(), format!("file:{path}"), "programs get the URI");
}
