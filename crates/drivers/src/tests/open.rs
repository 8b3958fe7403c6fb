//! Devices opened by URI, and refused ones.

use std::path::Path;

use tenmil_base::{Error, ErrorCategory};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

fn open_in(regions: &RegionTable, uri: &str) -> Result<OpenedDevice, Error> {
    let opener = Opener { regions, clock: Clock::start(), seed: 1, kinds: crate::KINDS };
    opener.open(&uri.parse::<Uri>()?)
}

fn open(uri: &str) -> Result<OpenedDevice, Error> {
    open_in(&RegionTable::new(8), uri)
}

#[test]
fn every_device_type_is_opened_by_uri() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let file = format!("file:{}?size=1m&block=4k&engine=threads", path.display());
    for (uri, block_size, blocks, said) in [
        ("null:", 512, 1 << 31, "null: no data is transferred"),
        ("null:?size=1m&block=4k", 4096, 256, "null: no data is transferred"),
        ("ram:1m", 512, 2048, "ram: volatile, lost when the process exits"),
        ("ram:?size=1m&block=1k", 1024, 1024, "ram: volatile, lost when the process exits"),
        (&file, 4096, 256, "by threads"),
        ("model:p4600?size=1m", 512, 2048, "a model of an Intel SSD DC P4600"),
        ("model:[ram:1m?block=4k]?device=p4800x", 4096, 256, "over ram"),
        ("delay:[ram:1m]?read=80us&read-p99=1ms", 512, 2048, "reads 80 us (p99 1 ms), writes"),
        ("fault:[ram:1m]", 512, 2048, "fault: none, on purpose; over ram"),
        ("fault:[ram:1m]?rule=hang:any;error:readx1", 512, 2048, "hang:any;error:readx1, on"),
        ("split:[ram:1m]?part=3&parts=4", 512, 512, "blocks 1536 to 2047 of ram"),
        ("split:[ram:1m]?offset=1k&size=4k", 512, 8, "blocks 2 to 9 of ram"),
        ("split:[ram:1m]?offset=1k", 512, 2046, "blocks 2 to 2047 of ram"),
        (
            "stripe:[ram:1m],[ram:65k]",
            512,
            256,
            "2 legs by 65536 bytes, volatile, lost when the process exits",
        ),
    ] {
        let opened = open(uri).unwrap();
        let limits = opened.medium.limits();
        assert_eq!((limits.block_size, limits.block_count), (block_size, blocks), "{uri}");
        assert!(opened.description.contains(said), "{}", opened.description);
        assert!(opened.existing.is_empty(), "{uri} is new");
    }
    assert!(Path::new(&path).exists());
    let again = open(&format!("file:{}", path.display())).unwrap();
    let existing: Vec<String> = again.existing.iter().map(ToString::to_string).collect();
    assert_eq!(existing.len(), 1);
    assert!(existing[0].contains("disk"), "{existing:?}");
}

#[test]
fn invalid_device_uri_is_rejected_with_the_accepted_form() {
    for (uri, problem) in [
        ("tape:0", "no devices of kind `tape`, expected one of null:, ram:, "),
        ("null:x", "path is `x`, expected none: null:?size=1t"),
        ("null:?colour=red", "no parameter `colour`, expected block or size"),
        ("ram:", "the size is missing, expected ram:1g"),
        ("ram:1g?size=1g", "the size is given twice, expected once"),
        ("ram:1000", "size is 1000 bytes, expected a multiple of the block of 512 bytes"),
        ("ram:0", "size is 0 bytes, expected a multiple of the block of 512 bytes"),
        ("file:", "the file is missing, expected file:/path/to/it"),
        ("file:/x?direct=maybe", "direct is `maybe`, expected yes or no"),
        ("file:/x?engine=aio", "engine is `aio`, expected auto, io_uring or threads"),
        ("model:p9", "no model `p9`, expected p4600 or p4800x"),
        ("model:[ram:1m]", "device is missing, expected device=p4600 or p4800x"),
        ("model:[ram:1m],[ram:1m]?device=p4600", "stands on 2 devices, expected one"),
        ("delay:ram", "stands on 0 devices, expected one"),
        ("delay:[ram:1m]?read=2us&read-p99=1us", "read-p99 is 1 us, expected from the mean"),
        ("fault:[ram:1m]?rule=burn:read", "rule: `burn` is not an effect, expected one of error"),
        ("split:[ram:1m]", "which part is not clear, expected part=0&parts=4 or offset=1m"),
        ("split:[ram:1m]?part=1", "part is `1`, expected a number from 0 to 0"),
        ("split:[ram:1m]?parts=4", "which part is not clear"),
        ("split:[ram:1m]?part=0&parts=4&size=1k", "which part is not clear"),
        ("split:[ram:1m]?part=4&parts=4", "part is `4`, expected a number from 0 to 3"),
        ("split:[ram:1m]?offset=1", "offset is 1 bytes, expected a multiple of the block of 512"),
        ("split:[ram:1m]?size=2m", "split: 4096 blocks from 0 on, expected at least 1"),
        ("split:[ram:1m]?offset=1m", "split: 0 blocks from 2048 on, expected at least 1"),
        ("stripe:", "stands on nothing, expected its legs: stripe:[ram:1g],[ram:1g]"),
    ] {
        let error = open(uri).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(&format!("{uri}: {problem}")), "{text}");
        assert_eq!(error.category(), ErrorCategory::Usage);
    }
}

#[test]
fn stacked_device_reports_existing_data_below() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let file = format!("file:{}?size=1m&engine=threads", path.display());
    open(&file).unwrap();
    let stack = format!("stripe:[delay:[{file}]?read=1us],[split:[delay:[ram:2m]]?offset=1m]");
    let opened = open(&stack).unwrap();
    assert_eq!(opened.existing.len(), 1, "{opened:?}");
    let uris: Vec<String> = opened.handles.iter().map(|handle| handle.uri().into()).collect();
    assert_eq!(uris, [format!("delay:[{file}]?read=1us"), "delay:[ram:2m]".into()]);
}

#[test]
fn open_error_has_its_category() {
    let missing = open("file:/no/such/directory/file?size=1m").unwrap_err();
    assert_eq!(missing.category(), ErrorCategory::Usage);
    assert!(missing.to_string().contains("open /no/such/directory/file: "), "{missing}");
    let regions = RegionTable::new(1);
    let _first = open_in(&regions, "ram:4k").unwrap();
    let full = open_in(&regions, "ram:4k").unwrap_err();
    assert_eq!(full.category(), ErrorCategory::Environment);
    assert!(full.to_string().contains("made for 1"), "{full}");
}
