//! A file as a block device, used from tokio. The reactors have threads of their own, and the
//! handle works on any thread.

use std::error::Error;

use tenmil::aio::{Claim, Device, IoError, Opener};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{ReactorOptions, Reactors, ThreadBuilder};

async fn write_and_read_back(device: Device, lba: u64) -> Result<bool, IoError> {
    let mut written = device.buffer(4096).expect("memory for a buffer");
    let empty = device.buffer(4096).expect("memory for another");
    written.store(0, format!("block {lba}").as_bytes());
    // Force Unit Access: the block is persistent when the write completes.
    let written = device.write_fua(lba, written).await?;
    let read = device.read(lba, empty).await?;
    Ok(read.to_vec() == written.to_vec())
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&CpuList::allowed(), &ReactorOptions::default(), &clock)?;
    let thread = reactors.spawn(ThreadBuilder::new("storage"))?;
    let directory = tempfile::tempdir()?;
    let uri = format!("file:{}?size=1m&block=4k", directory.path().join("disk").display());
    let device = Opener::new(&clock)?.open(&uri.parse()?, Claim::WriteOnce, &thread).await?;

    let start = |lba| tokio::spawn(write_and_read_back(device.clone(), lba));
    let tasks: Vec<_> = (0..32).map(start).collect();
    for task in tasks {
        assert!(task.await??, "what was read is not what was written");
    }
    println!("32 tasks of tokio have written and read back");
    Ok(())
}
