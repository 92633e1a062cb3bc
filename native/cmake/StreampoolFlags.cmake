# How our own code is compiled. `streampool_flags(target)` asks for it; other people's headers come in as SYSTEM.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "streampool needs GCC 11 or newer (C++20); this is ${CMAKE_CXX_COMPILER_VERSION}.")
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  message(FATAL_ERROR "streampool needs Clang 14 or newer (C++20); this is ${CMAKE_CXX_COMPILER_VERSION}.")
endif()

# Sanitizers go on everything, other people's sources too.
if(STREAMPOOL_SANITIZE)
  add_compile_options(-fsanitize=${STREAMPOOL_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g)
  add_link_options(-fsanitize=${STREAMPOOL_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    add_compile_options(-fno-sanitize=function)  # the driver's functions are called through types of our own
  endif()
endif()

function(streampool_flags target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wconversion -Wshadow -fno-semantic-interposition
    "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    target_compile_options(${target} PRIVATE -Wno-sign-conversion)  # not part of -Wconversion in GCC
  elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict)  # false alarms on `"text" + string` (GCC bug 105651)
  endif()
  if(STREAMPOOL_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
