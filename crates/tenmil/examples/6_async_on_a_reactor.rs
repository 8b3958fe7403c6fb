//! A storage application as an async task on the reactor that also polls the SSD. The task opens
//! the SSD itself; the blocking part of that runs on another thread while the reactor continues.

use std::error::Error;

use tenmil::aio::{Claim, Device, IoError, Opener};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::task::ExecutorHandle;
use tenmil_reactor::{ReactorOptions, Reactors, ThreadBuilder};

async fn write_and_read_back(device: Device) -> Result<bool, IoError> {
    let mut written = device.buffer(4096).expect("memory for a buffer");
    let empty = device.buffer(4096).expect("memory for another");
    written.store(0, b"ten million");
    let written = device.write(7, written).await?;
    device.flush().await?;
    let read = device.read(7, empty).await?;
    Ok(read.to_vec() == written.to_vec())
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&CpuList::allowed(), &ReactorOptions::default(), &clock)?;
    let thread = reactors.spawn(ThreadBuilder::new("storage"))?;
    let tasks =
        ExecutorHandle::start(&thread, "tasks", 64).map_err(|_| "the thread takes no messages")?;

    let (opener, home) = (Opener::new(&clock)?, thread.clone());
    let uri = "emu:ram".parse()?;
    let application = async move {
        let device = opener.open(&uri, Claim::WriteOnce, &home).await?;
        Ok::<_, Box<dyn Error + Send + Sync>>(write_and_read_back(device).await?)
    };
    let same = tasks.spawn(application)?.wait()?;
    let same = same.map_err(|error| -> Box<dyn Error> { error })?;
    assert!(same, "what was read is not what was written");
    println!("written and read back on {}", thread.name());
    Ok(())
}
