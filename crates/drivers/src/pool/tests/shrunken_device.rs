//! Pools whose devices have become shorter.

use std::os::unix::fs::FileExt;

use super::devices::{rescue_and_summarize, write_fill_bytes};
use super::{PoolFixture, VolumeOp};
use crate::pool::create_pool;

/// A pool with two volumes and a snapshot, whose data is spread over the whole device.
fn pool_over_whole_device() -> PoolFixture {
    let bench = PoolFixture::new("12m");
    let sizes = [("first", 704), ("second", 1216)];
    for (uuid, (name, blocks)) in (1..).zip(sizes) {
        let (name, unit, checksums) = (name.to_owned(), 16, uuid == 1);
        let change = VolumeOp::Create { name, blocks, unit, uuid, checksums };
        bench.open_pool().execute_volume_op(change).unwrap();
    }
    for (name, blocks) in sizes {
        let opened = bench.open_volume(name).unwrap();
        write_fill_bytes(&mut bench.volume_client(&*opened.medium, 0), 0..blocks);
    }
    bench.snapshot("first", "before");
    create_pool(&bench.opener(), &bench.new_file_uri("target", "32m"), "target", true).unwrap();
    bench
}

#[test]
fn volumes_on_a_shrunken_device_are_rescued() {
    for (bytes, has_superblocks) in
        [(6 << 20, true), (6 << 20, false), ((3 << 20) + 777, true), (64 << 10, true), (8192, true)]
    {
        let bench = pool_over_whole_device();
        bench.set_file_len("pool", bytes);
        if !has_superblocks {
            let file = std::fs::File::options().write(true).open(bench.path("pool")).unwrap();
            file.write_all_at(&[0xa5; 8192], 0).unwrap();
        }
        let error = bench.open_volume("first").unwrap_err().to_string();
        assert!(error.contains("expected 3072 at least") || !has_superblocks, "{error}");
        let (volumes, damaged) = rescue_and_summarize(&bench, &bench.pool_ref(), &[]);
        let said = format!("it has {} bytes, expected 12582912 at least", bytes / 4096 * 4096);
        assert!(damaged[0].contains(&said) || !has_superblocks, "{damaged:?}");
        assert!(damaged.iter().all(|text| !text.contains("Outcome(")), "{damaged:?}");
        let lost = |name| volumes.iter().find(|(found, _)| found == name).map(|(_, lost)| *lost);
        if bytes >= 6 << 20 {
            assert_eq!((lost("first"), lost("before")), (Some(0), Some(0)), "{volumes:?}");
            assert!(lost("second").is_some_and(|lost| (1..1216).contains(&lost)), "{volumes:?}");
        }
    }
}

#[test]
fn lost_end_of_a_second_device_is_reported_and_the_rest_rescued() {
    let bench = pool_over_whole_device();
    bench.add_device("b", "8m");
    let change = VolumeOp::Resize { name: "second".into(), blocks: 3840 };
    bench.open_pool().execute_volume_op(change).unwrap();
    let opened = bench.open_volume("second").unwrap();
    write_fill_bytes(&mut bench.volume_client(&*opened.medium, 0), 0..3840);
    drop(opened);
    bench.set_file_len("b", 3 << 20);
    let (volumes, damaged) = rescue_and_summarize(&bench, &bench.pool_ref(), &[]);
    assert!(damaged[0].starts_with("device 1, file:"), "{damaged:?}");
    assert!(damaged[0].ends_with("it has 3145728 bytes, expected 8388608 at least"), "{damaged:?}");
    let lost = |name| volumes.iter().find(|(found, _)| found == name).unwrap().1;
    assert_eq!((lost("first"), lost("before")), (0, 0), "{volumes:?}");
    assert!((1..1216).contains(&lost("second")), "{volumes:?}");
}
