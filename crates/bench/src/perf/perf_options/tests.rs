//! Exact text of each validation error.

use tenmil_base::{ErrorCategory, Span};

use tenmil_dma::CommandStore;
use tenmil_linux::CpuList;

use crate::balance::parse_scheduler_rules;

use super::{
    AccessPattern, ArrivalProcess, BaselineKind, MachineResources, OpenLoop, PerfOptions, SizeMix,
    SizeShare,
};

fn core_list(text: &str) -> CpuList {
    CpuList::parse(text).unwrap()
}

fn machine_resources() -> MachineResources {
    MachineResources { cores: core_list("0-1,3"), memory_available_bytes: 1 << 30 }
}

/// Error text for default options with this change.
fn validation_error(change: impl FnOnce(&mut PerfOptions)) -> String {
    let mut options = PerfOptions::default();
    change(&mut options);
    let refused = options.validate(&machine_resources()).unwrap_err();
    assert_eq!(refused.category, ErrorCategory::Usage);
    assert!(!refused.text.contains('\n'), "one line: {refused}");
    refused.text
}

#[test]
fn default_options_are_as_documented_and_valid() {
    let options = PerfOptions::default();
    assert_eq!(options.validate(&machine_resources()), Ok(()));
    assert_eq!((options.device_count(), options.depth, options.thread_count()), (21, 128, 1));
    assert_eq!(options.buffer_bytes(), 21 * 128 * 4096);
    let extras = options.with_default_baseline_and_report();
    assert_eq!(extras.baseline_time, Some(Span::from_secs(1)));
    assert_eq!(extras.ram, Some(Span::from_secs(2)));
    assert_eq!(extras.html.as_deref(), Some("tenmil-perf.html"));
}

#[test]
fn depth_of_zero_or_above_the_controller_maximum_is_rejected() {
    assert_eq!(
        validation_error(|options| options.depth = 0),
        "-q 0: depth is 0, expected at least 1"
    );
    assert_eq!(
        validation_error(|options| (options.depth, options.depth_may_be_less) = (1024, false)),
        "-q 1024: depth is 1024, expected 1 to 1023, which emu:null?count=21 allows"
    );
    assert_eq!(
        validation_error(|options| (options.depth, options.queue_pairs) = (1, 2)),
        "-q 1: depth is 1, expected at least 2, one for each queue pair"
    );
    let two_pairs = PerfOptions {
        depth: 1024,
        depth_may_be_less: false,
        queue_pairs: 2,
        ..PerfOptions::default()
    };
    assert_eq!(
        two_pairs.validate(&machine_resources()),
        Ok(()),
        "two queue pairs hold twice as many"
    );
}

#[test]
fn more_queue_pairs_than_the_controller_supports_are_rejected() {
    assert_eq!(
        validation_error(|options| options.queue_pairs = 0),
        "-P 0: no queue pairs, expected at least 1"
    );
    assert_eq!(
        validation_error(|options| (options.queue_pairs, options.cores) = (33, core_list("0-1"))),
        "-P 33: 66 queue pairs over all submitting threads, expected at most 64, which \
         emu:null?count=21 allows"
    );
}

#[test]
fn size_that_is_no_multiple_of_the_block_size_is_rejected() {
    assert_eq!(
        validation_error(|options| options.sizes = SizeMix::single_size(1000)),
        "-o 1000: size is 1000 bytes, expected a multiple of the 512-byte blocks of \
         emu:null?count=21"
    );
    assert_eq!(
        validation_error(|options| options.sizes = SizeMix::parse("4k:1,1000:2").unwrap()),
        "--bssplit 4096:1,1000:2: size is 1000 bytes, expected a multiple of the 512-byte blocks \
         of emu:null?count=21"
    );
    assert_eq!(
        validation_error(|options| {
            options.uris = vec!["emu:ram?size=4k".parse().unwrap()];
            options.sizes = SizeMix::single_size(8192);
        }),
        "-o 8192: size is 8192 bytes, expected at most the 4096 bytes of emu:ram?size=4k"
    );
}

#[test]
fn nonexistent_core_is_rejected() {
    assert_eq!(
        validation_error(|options| options.cores = core_list("0,2")),
        "-c 0,2: core 2 does not exist or is not ours, expected some of 0-1,3"
    );
    assert_eq!(
        validation_error(|options| options.device_cores = core_list("9")),
        "--device-cores 9: core 9 does not exist or is not ours, expected some of 0-1,3"
    );
}

#[test]
fn scheduler_rules_for_unused_cores_are_rejected() {
    let with = |cores: &str, rules: &str| {
        let (cores, rules) = (CpuList::parse(cores).unwrap_or_default(), rules.to_owned());
        move |options: &mut PerfOptions| {
            (options.cores, options.scheduler) = (cores, parse_scheduler_rules(&rules).unwrap());
        }
    };
    for (cores, rules, said) in [
        (
            "0,3",
            "dynamic?scheduling-core=1",
            "scheduler: scheduling core is 1, expected a reactor's: 0,3",
        ),
        ("0,3", "static?isolated=1", "isolated cores are 1"),
        ("0,3", "dynamic?isolated=0,3", "isolated cores are 0,3"),
        ("0,3", "dynamic?isolated=3&scheduling-core=3", "scheduling core 3 is isolated"),
        // The default core is known to the check as well.
        ("", "dynamic?scheduling-core=3", "scheduling core is 3, expected a reactor's: 0"),
    ] {
        let text = validation_error(with(cores, rules));
        assert!(text.starts_with("scheduler: ") && text.contains(said), "{text}");
    }
    let mut options = PerfOptions::default();
    with("0,3", "dynamic?scheduling-core=3&isolated=0")(&mut options);
    assert_eq!(options.validate(&machine_resources()), Ok(()));
}

#[test]
fn buffers_that_exceed_memory_are_rejected() {
    assert_eq!(
        validation_error(|options| options.sizes = SizeMix::single_size(1 << 20)),
        "-q 128 and -o 1048576: buffers for 21 SSDs are 2688 MiB, expected at most half of the \
         1024 MiB of memory that are available"
    );
}

#[test]
fn emulated_ssd_that_exceeds_memory_is_rejected() {
    assert_eq!(
        validation_error(|options| options.uris = vec!["emu:ram?count=2&size=1g".parse().unwrap()]),
        "emu:ram?count=2&size=1g: 2048 MiB of memory, expected at most the 1024 MiB that are \
         available"
    );
}

#[test]
fn missing_file_is_rejected_unless_it_will_be_created() {
    let options =
        |uri: &str| PerfOptions { uris: vec![uri.parse().unwrap()], ..PerfOptions::default() };
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let there = format!("emu:file:{}", file.path().display());
    assert_eq!(options(&there).validate(&machine_resources()), Ok(()));
    assert_eq!(options("emu:file:/nowhere/disk?size=1g").validate(&machine_resources()), Ok(()));
    let refused = |uri| options(uri).validate(&machine_resources()).unwrap_err().text;
    assert_eq!(
        refused("emu:file:/nowhere/disk"),
        "emu:file:/nowhere/disk: no such file or directory, expected a file that is there, or `?size=` to \
         make one"
    );
    assert_eq!(refused("emu:file:/"), "emu:file:/: no ordinary file, expected one");
}

#[test]
fn version_map_that_exceeds_memory_is_rejected() {
    assert_eq!(
        validation_error(|options| {
            options.uris = vec!["emu:file:/nowhere/disk?size=1t".parse().unwrap()];
            options.verify = true;
        }),
        "--verify: the table of emu:file:/nowhere/disk?size=1t is 8192 MiB, expected at most half \
         of the 1024 MiB of memory that are available"
    );
}

#[test]
fn verification_requires_a_device_that_stores_data() {
    assert_eq!(
        validation_error(|options| options.verify = true),
        "--verify: emu:null?count=21 keeps no data, expected a medium that does, such as emu:ram"
    );
}

#[test]
fn options_without_effect_are_rejected_by_name() {
    let over_ram = |change: fn(&mut PerfOptions)| {
        validation_error(|options| {
            options.uris = vec!["ram:1g".parse().unwrap()];
            change(options);
        })
    };
    let rings = "ram:1g has no rings and doorbells, expected emulated SSDs such as emu:ram";
    assert_eq!(
        over_ram(|options| options.techniques.doorbell_batching = false),
        format!("--no-doorbell-batching: {rings}")
    );
    assert!(
        over_ram(|options| options.device_cores = core_list("0")).starts_with("--device-cores: ")
    );
    assert!(
        over_ram(|options| options.ram = Some(Span::from_secs(1))).starts_with("--ram: ram:1g")
    );
    let second = Some(Span::from_secs(1));
    assert_eq!(
        validation_error(|options| {
            options.uris = vec!["ram:1g".parse().unwrap(), "null:".parse().unwrap()];
            options.baseline_time = Some(Span::from_secs(1));
        }),
        "--baseline: null: has neither a ring nor a copy micro-benchmark, expected emulated SSDs \
         alone, ram: alone, or --baseline=tcp"
    );
    let of_tcp = |change: fn(&mut PerfOptions)| {
        let uris = vec!["null:".parse().unwrap()];
        let baseline_time = Some(Span::from_secs(1));
        let baseline_kind = BaselineKind::Tcp;
        let mut options =
            PerfOptions { uris, baseline_time, baseline_kind, ..PerfOptions::default() };
        change(&mut options);
        options.validate(&machine_resources())
    };
    assert_eq!(of_tcp(|_| {}), Ok(()));
    let mixed = of_tcp(|options| options.sizes = SizeMix::parse("4k:1,8k:1").unwrap());
    assert_eq!(
        mixed.unwrap_err().to_string(),
        "--baseline: several sizes, expected one: bare messages are of one size"
    );
    let mixed = of_tcp(|options| options.pattern = AccessPattern::RandRw).unwrap_err().to_string();
    assert!(mixed.starts_with("--baseline: pattern randrw mixes reads and writes"), "{mixed}");
    let over_ram = over_ram(|options| {
        (options.baseline_time, options.pattern) = (Some(Span::from_secs(1)), AccessPattern::Trim);
    });
    assert!(over_ram.starts_with("--baseline: pattern trim copies no data"), "{over_ram}");
    let uris = vec!["ram:1g".parse().unwrap()];
    let options = PerfOptions { uris, baseline_time: second, ..PerfOptions::default() };
    assert_eq!(options.validate(&machine_resources()), Ok(()));
    let mut options = PerfOptions::default();
    options.uris.push("ram:1g".parse().unwrap());
    options.techniques.shadow_doorbells = true;
    assert_eq!(options.validate(&machine_resources()), Ok(()), "the SSDs beside it have doorbells");
}

#[test]
fn percentages_times_counts_rates_and_skews_are_bounded() {
    assert_eq!(
        validation_error(|options| options.read_percent = 101),
        "-M 101: read share is 101, expected 0 to 100"
    );
    assert_eq!(
        validation_error(|options| options.time = Span { ns: 0 }),
        "-t 0: no time to measure in, expected more than 0"
    );
    assert_eq!(
        validation_error(|options| options.io_count = Some(0)),
        "-d 0: no I/Os to do, expected at least 1"
    );
    let rate = OpenLoop { per_second: 0, arrivals: ArrivalProcess::Poisson };
    assert_eq!(
        validation_error(|options| options.rate = Some(rate)),
        "--rate 0: expected 1 to 1000000000 I/Os per second"
    );
    for theta in [0.0, -1.0, f64::NAN, 5.1] {
        assert_eq!(
            validation_error(|options| options.zipf = Some(theta)),
            format!("--zipf {theta}: expected more than 0 and at most 5")
        );
    }
    assert_eq!(
        validation_error(|options| (options.zipf, options.pattern) = (Some(0.9), AccessPattern::Rw)),
        "--zipf: pattern rw is sequential, expected a random one such as randread"
    );
    assert_eq!(
        validation_error(|options| options.uris = vec!["emu:null?count=256".parse().unwrap(); 5]),
        "1280 SSDs are named, expected 1 to 1024"
    );
    assert_eq!(
        validation_error(|options| options.uris.clear()),
        "0 SSDs are named, expected 1 to 1024"
    );
}

#[test]
fn command_store_that_the_cpu_lacks_is_rejected_by_name() {
    for store in CommandStore::ALL {
        let mut options = PerfOptions::default();
        options.techniques.command_store = Some(store);
        match options.validate(&machine_resources()) {
            Ok(()) => assert!(store.is_supported(), "{store:?}"),
            Err(refused) => {
                assert!(!store.is_supported(), "{store:?}");
                let name = store.name();
                let start = format!("--command-store {name}: command store is `{name}`, and ");
                assert!(refused.text.starts_with(&start), "{refused}");
                assert!(refused.text.contains("`plain`"), "{refused}");
            }
        }
    }
}

#[test]
fn size_mix_text_parses_back() {
    let mix = SizeMix::parse("4k:70,64k:30").unwrap();
    assert_eq!(mix.shares[1], SizeShare { len_bytes: 65_536, weight: 30 });
    assert_eq!(mix.largest_bytes(), 65_536);
    assert_eq!(mix.to_string(), "4096:70,65536:30");
    assert_eq!(SizeMix::parse("4k"), Ok(SizeMix::single_size(4096)));
    assert_eq!(
        SizeMix::parse("4k:0"),
        Err("weight `0` in `4k:0`, expected 1 to 1000000, as in 4k:70,64k:30".into())
    );
    assert_eq!(SizeMix::parse("32m"), Err("size is `32m`, expected one block to 16m".into()));
    assert_eq!(SizeMix::parse("0"), Err("size is `0`, expected one block to 16m".into()));
    let nine = ["4k"; 9].join(",");
    assert_eq!(SizeMix::parse(&nine), Err(format!("`{nine}` has 9 sizes, expected at most 8")));
}

#[test]
fn default_depth_is_reduced_to_the_device_maximum_and_a_given_one_rejected() {
    let usual = PerfOptions::default();
    assert_eq!(
        (usual.with_depth_limited(127).depth, usual.with_depth_limited(1000).depth),
        (127, 128)
    );
    assert!(usual.check_queues(&"it", 127, 1000).is_ok());
    let asked = PerfOptions { depth_may_be_less: false, ..usual };
    assert_eq!(asked.with_depth_limited(127).depth, 128);
    let refused = asked.check_queues(&"it", 127, 1000).unwrap_err().text;
    assert_eq!(refused, "-q 128: depth is 128, expected 1 to 127, which it allows");
}
