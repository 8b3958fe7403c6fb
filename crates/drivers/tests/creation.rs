//! Files are made once nothing is refused any more. Alone in its process, whose policy it sets.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;

use tenmil_base::{BlockDevice, BlockExtent, Error, IoChannel, Limits, Operation, OperationSet};
use tenmil_block::uri::Uri;
use tenmil_block::{NamedDeviceType, OpenedDevice, Opener};
use tenmil_dma::RegionTable;
use tenmil_drivers::mirror;
use tenmil_linux::Clock;
use tenmil_linux::storage_file::{CreationPolicy, set_creation_policy, undo_created};

/// A device that no mirror can have as a leg.
struct UnfitDevice {
    below: Arc<dyn BlockDevice>,
    limits: Limits,
    has_status: bool,
}

impl BlockDevice for UnfitDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        self.below.channel()
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        match self.has_status {
            true => self.below.block_status(lba),
            false => Err(Error::environment("read the status of blocks: no reply")),
        }
    }
}

/// Opens `unfit:NAME`, 8 MiB of memory that are unfit in the way of that name.
fn open_unfit(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let below = opener.open(&"ram:8m".parse().unwrap())?.medium;
    let (mut limits, mut has_status) = (below.limits(), true);
    match uri.path() {
        "flush" => {
            limits.operations =
                limits.operations.without(OperationSet::from_operations(&[Operation::Flush]))
        }
        "metadata" => limits.metadata_size = 8,
        "status" => has_status = false,
        other => panic!("{other}"),
    }
    Ok(OpenedDevice::without_existing_data(
        Arc::new(UnfitDevice { below, limits, has_status }),
        "an unfit device",
    ))
}

#[test]
fn mirror_with_an_invalid_leg_creates_and_grows_no_file() {
    set_creation_policy(CreationPolicy::Recorded);
    let mut kinds: Vec<NamedDeviceType<'_>> = tenmil_drivers::KINDS.to_vec();
    kinds.push(("unfit", &open_unfit));
    let regions = RegionTable::new(200);
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, kinds: &kinds };
    let directory = tempfile::tempdir().unwrap();
    let [new, short] = ["new", "short"].map(|name| directory.path().join(name));
    for (way, why) in
        [("flush", "has no flush"), ("metadata", "bytes of metadata"), ("status", "no reply")]
    {
        let expected = [0; 4096];
        #[expect(clippy::disallowed_methods, reason = "it makes the file that is to stay short")]
        std::fs::write(&short, expected).unwrap();
        let file = |path: &std::path::Path| {
            format!("file:{}?size=8m&engine=threads", path.display()).parse().unwrap()
        };
        let legs: Vec<Uri> =
            vec![file(&new), file(&short), format!("unfit:{way}").parse().unwrap()];
        let refused = mirror::create_mirror(&opener, &legs, false).unwrap_err();
        assert!(refused.text.contains(why), "{way}: {refused}");
        undo_created();
        assert!(!new.exists(), "{way}");
        assert_eq!(short.metadata().unwrap().len(), expected.len() as u64, "{way}");
    }
}
