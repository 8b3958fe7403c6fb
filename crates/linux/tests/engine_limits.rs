//! Many engines within tight limits of the process. Alone in its process, since it changes these.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tenmil_base::ChannelGroup;
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::file_engine::{EngineChoice, EngineLimits, FileEngine, FileOp};
use tenmil_linux::storage_file::{FileOptions, StorageFile};

const FILES: usize = 100;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn hundred_engines_of_a_group_fit_into_small_limits() {
    for (resource, limit) in [(Resource::Nofile, 256), (Resource::Memlock, 64 << 10)] {
        let before = getrlimit(resource);
        setrlimit(resource, Rlimit { current: Some(limit), ..before }).unwrap();
    }
    let directory = tempfile::tempdir().unwrap();
    let regions = RegionTable::new(1);
    let memory =
        regions.add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap()).unwrap();
    let open = |index: usize| {
        let options = FileOptions {
            path: directory.path().join(index.to_string()),
            len_bytes: Some(4096),
            unit_bytes: 4096,
            direct: false,
            read_only: false,
        };
        Arc::new(StorageFile::open(&options).unwrap())
    };
    let files: Vec<_> = (0..FILES).map(open).collect();
    let before = descriptors();
    let limits = EngineLimits { depth: 2, segments_max: 1 };
    let engine = |file: &Arc<StorageFile>| {
        FileEngine::new(Arc::clone(file), &regions, limits, EngineChoice::IoUring)
    };
    let opened =
        ChannelGroup::open_together(|| files.iter().map(engine).collect::<Result<Vec<_>, _>>());
    let mut engines = match opened {
        Ok(engines) => engines,
        Err(error) if tenmil_linux::MachineEnvironment::read().io_uring.is_err() => {
            return println!("skipped: {error}");
        }
        Err(error) => panic!("{error}"),
    };
    assert_eq!(descriptors() - before, 4, "one for each ring");
    for (engine, token) in engines.iter_mut().zip(0..) {
        engine.submit(token, FileOp::Read { offset: 0, into: &[memory] }).unwrap();
    }
    engines[0].flush();
    let mut ended = Vec::new();
    while ended.len() < FILES {
        for engine in &mut engines {
            engine.poll(&mut ended);
        }
    }
    assert!(ended.iter().all(|job| job.result == Ok(())), "{ended:?}");
    drop(engines);
    assert_eq!(descriptors(), before);
}
