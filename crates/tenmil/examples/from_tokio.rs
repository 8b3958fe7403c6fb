//! An SSD of ours, used from tokio: the reactor has threads of its own, and the handle goes anywhere.

use std::error::Error;

use host::{Clock, Cores};
use reactor::{ReactorOptions, Reactors, ThreadPlan};
use tenmil::aio::{self, Device, NotDone};

async fn write_and_read_back(device: Device, lba: u64) -> Result<bool, NotDone> {
    let mut written = device.buffer(4096).expect("memory for a buffer");
    let empty = device.buffer(4096).expect("memory for another");
    written.store(0, format!("block {lba}").as_bytes());
    let written = device.write(lba, written).await?;
    let read = device.read(lba, empty).await?;
    Ok(read.to_vec() == written.to_vec())
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&Cores::allowed(), &ReactorOptions::default(), &clock)?;
    let thread = reactors.spawn(ThreadPlan::new("storage"))?;
    let device = aio::open(&"emu:ram?block=4k".parse()?, &thread, &clock)?.remove(0);

    let start = |lba| tokio::spawn(write_and_read_back(device.clone(), lba));
    let tasks: Vec<_> = (0..32).map(start).collect();
    for task in tasks {
        assert!(task.await??, "what was read is not what was written");
    }
    println!("32 tasks of tokio have written and read back");
    Ok(())
}
